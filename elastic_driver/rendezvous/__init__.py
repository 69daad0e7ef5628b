"""Rendezvous: how workers learn their round and find each other, over HTTP.

The wire is here, the server in ``server/``.
"""
