"""Says where everything of a run would be, and what it would need, without starting anything."""
