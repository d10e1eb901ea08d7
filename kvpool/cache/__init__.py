"""The KV cache manager: specs, one manager per attention type, coordinators of several groups."""
