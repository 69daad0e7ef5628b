"""Rendezvous: how workers learn their round and find each other, over HTTP."""
