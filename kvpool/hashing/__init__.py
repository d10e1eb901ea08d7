"""Block hashes: what they are made of, by which algorithms, and how requests get theirs."""
