"""The HTTP server of the rendezvous: connections, parked requests and the key-value store.

Gives requests no meaning.
"""
