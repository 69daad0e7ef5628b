"""The collective engines: named operations in any order, over the native extension or over torch's Gloo."""
