"""The Messages dialect of Anthropic's clients, translated to and from what the rest of the gateway speaks."""
