"""Services of the operating system and of the event loop, besides the project's own sockets and processes."""
