"""``kvpool generate``: prompts through a model on the paged cache, and what that took."""
