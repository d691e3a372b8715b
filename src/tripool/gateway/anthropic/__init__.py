"""Anthropic's Messages API, translated to and from the gateway's own requests and answers."""
