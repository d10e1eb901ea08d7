"""Device memory of the paged cache: allocation, layout, swaps to the host."""
