"""Ollama's API, as far as its clients need it: chats, prompts and the list of models."""
