"""One step as tensors: block tables, positions and slots, states of requests, sampling."""
