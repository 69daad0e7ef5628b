"""Starting, supervising and ending worker processes."""
