"""Side-by-side runs against what one would use without us, and their reports."""
