"""How transformers models are called: the adapter, attention, RoPE, loading, packed weights."""
