"""OpenAI's Responses API: items in, items out, and named events in a stream."""
