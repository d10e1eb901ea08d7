"""Models of transformers on the paged cache: loading, attention modules, tensor parallelism."""
