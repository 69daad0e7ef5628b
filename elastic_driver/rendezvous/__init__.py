"""Rendezvous: how workers get their round and find each other, over HTTP.

The protocol and its client are here; the server is in ``server/``.
"""
