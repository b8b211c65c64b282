"""Replicas' life cycle, routing, pause and resume, and the continuation of cut generations."""
