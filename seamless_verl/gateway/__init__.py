"""Serves agents: OpenAI and Anthropic APIs by vLLM's own serving classes, over a fleet of replicas."""
