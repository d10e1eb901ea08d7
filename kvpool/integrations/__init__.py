"""kvpool under engines of others. Nothing here is imported by the package itself."""
