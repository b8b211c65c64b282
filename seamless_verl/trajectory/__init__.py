"""The token-level record of sessions: turns, trajectory trees, training sequences, drift. Plain data and functions."""
