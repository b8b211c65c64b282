"""The face agents see: OpenAI and Anthropic APIs, served by vLLM's own classes over a fleet of replicas."""
