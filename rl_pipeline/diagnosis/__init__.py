"""What makes a run slow: its parts measured alone and together, and what would change that."""
