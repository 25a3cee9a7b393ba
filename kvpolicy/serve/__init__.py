"""A server for plans of one model, with OpenAI's interface; needs the extra ``serve``."""
