"""The gateway: OpenAI's HTTP API in front of a router."""
