"""Side-by-side measurements against what somebody would use instead, and their reports."""
