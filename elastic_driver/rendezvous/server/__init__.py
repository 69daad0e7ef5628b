"""The HTTP server of the rendezvous: connections, parked requests and the key-value store.

It carries requests; their meaning is defined by the routes it is given.
"""
