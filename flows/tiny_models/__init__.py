"""Train the shipped tiny models again from their recipes."""
