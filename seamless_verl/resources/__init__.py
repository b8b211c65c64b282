"""What machines can do and where the parts of a run go; lending policies, simulator and ledger build on it. Pure."""
