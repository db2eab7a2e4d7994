"""What a client gets when providers fail: ours beside LiteLLM's proxy and Portkey's gateway."""
