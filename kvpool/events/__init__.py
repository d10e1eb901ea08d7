"""KV cache events: their wire format, and the sockets that publish and replay them."""
