"""Computations that several policies share; policies import them from here."""

from kvpolicy.compat import cache_argument
from kvpolicy.toolkit.apportion import largest_remainder
from kvpolicy.toolkit.attention_window import (
    GroupReduce,
    Pooling,
    odd,
    pool,
    pooled_window_attention,
    ranked_window_scores,
    window_scores,
)
from kvpolicy.toolkit.draws import uniform
from kvpolicy.toolkit.layer_tables import (
    LayerTable,
    LayerTableError,
    layer_table_with_hash,
    load_layer_table,
    save_layer_table,
)
from kvpolicy.toolkit.paragraphs import (
    PARAGRAPH,
    THINK_TAGS,
    Paragraphs,
    look_up,
    steering_change,
    texts_in_context,
    token_texts,
    tokens_containing,
    tokens_equal,
)
from kvpolicy.toolkit.ranking import score_in_rank_order, take_rows
from kvpolicy.toolkit.redundancy import Retain, key_redundancy
from kvpolicy.toolkit.steering_vectors import (
    Calibration,
    SteeringVector,
    load_hashed,
    load_steering_vector,
    load_steering_vectors,
    save_steering_vectors,
    with_hash,
)
from kvpolicy.toolkit.tensor_files import TensorFiles

__all__ = [
    "PARAGRAPH",
    "THINK_TAGS",
    "Calibration",
    "GroupReduce",
    "LayerTable",
    "LayerTableError",
    "Paragraphs",
    "Pooling",
    "Retain",
    "SteeringVector",
    "TensorFiles",
    "cache_argument",
    "key_redundancy",
    "largest_remainder",
    "layer_table_with_hash",
    "load_hashed",
    "load_layer_table",
    "load_steering_vector",
    "load_steering_vectors",
    "look_up",
    "odd",
    "pool",
    "pooled_window_attention",
    "ranked_window_scores",
    "save_layer_table",
    "save_steering_vectors",
    "score_in_rank_order",
    "steering_change",
    "take_rows",
    "texts_in_context",
    "token_texts",
    "tokens_containing",
    "tokens_equal",
    "uniform",
    "window_scores",
    "with_hash",
]
