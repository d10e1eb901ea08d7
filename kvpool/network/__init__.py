"""Sockets that listen: who may connect (CURVE), how much a peer may send, how many peers there are."""
