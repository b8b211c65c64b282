"""The lending policies and the staleness bound in virtual time, for layouts and workloads not at hand. Pure."""
