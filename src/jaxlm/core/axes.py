"""Names of all axes.

Logical axes name the dimensions of arrays; mesh axes name the dimensions of the device mesh. A run has two mappings from
logical to mesh axes: one for stored parameters and one for computation (`jaxlm.core.sharding`).
"""

from collections.abc import Sequence
from typing import Any

from jaxlm.core.imports import haliax

# Logical axes of data and activations.
MICROBATCH = "microbatch"  # one gradient-accumulation slice of a step's batch
BATCH = "batch"
DENOISER = "denoiser"  # the part of a model that computes a row
PAIR = "pair"  # the chosen (0) and the rejected (1) completion of a prompt
GROUP = "group"  # the sampled responses to a prompt
CHOICES = "choices"  # the experts of a token
REWARD = "reward"  # the rewards of a response, before they are added
POSITION = "position"
KEY_WORD = "key_word"  # the words of a random key
KEY_POSITION = "key_position"  # the position axis of attention's keys and values
CACHE_ROW = "cache_row"  # (batch row, KV head) pairs, for KV caches that flatten the two into one axis

# Logical axes of parameters.
LAYERS = "layers"
EMBED = "embed"
MTP_INPUT = "mtp_input"  # a token embedding and a hidden state, side by side
MLP = "mlp"
SHARED_MLP = "shared_mlp"  # features of the expert that all tokens share, in a model with others
EXPERTS = "experts"
ROUTES = "routes"  # all experts in the router's output; separate from EXPERTS, which may be sharded
VOCAB = "vocab"
TEACHER_TOP = "teacher_top"  # a teacher's most likely tokens, the most likely first
KV_HEADS = "kv_heads"
KEY_HEADS = "key_heads"  # keys that value heads share, which no mesh shards
HEADS = "heads"  # query heads
HEAD_SIZE = "head_size"
QUERY_LATENT = "query_latent"  # features of the vector of a token from which the queries of all heads are projected
LATENT = "latent"  # the same for keys and values
LATENT_KEY = "latent_key"  # those and the features of a rotated key that all heads share, side by side
STATE_HEADS = "state_heads"  # heads of queries and keys in a recurrent layer
STATE_GROUP = "state_group"  # the value heads, with a state each, that read the same of them
STATE_KEY = "state_key"  # features of a key there; those of a value are `head_size`
CONV_TAPS = "conv_taps"  # of a short convolution, or the tokens before one that it reads
QUERY_GROUP = "query_group"  # the query heads that read the same key/value head
ROTARY_PAIRS = "rotary_pairs"  # pairs of features that are rotated together
LORA = "lora_rank"
PACKED = "packed"  # bytes of a weight with two codes each, of all its axes
BLOCKS = "blocks"  # blocks of a weight with a scale each, likewise
SCALE_BLOCKS = "scale_blocks"  # blocks of those scales
VALUE_LAYERS = "value_layers"  # the layers with a value embedding
STACKED_LAYERS = (LAYERS, VALUE_LAYERS)
VALUE_EMBED = "value_embed"  # features of a value embedding: those of all key/value heads
LAYER_INPUT = "layer_input"  # features of what a layer reads beside the residual stream
LAYER_INPUTS = "layer_inputs"  # those of all layers, side by side
GATE_CHANNELS = "gate_channels"  # the first features of the residual stream, as the gates of value embeddings read them
SMEAR_CHANNELS = "smear_channels"  # the same for the smear gate
LOOKUP_ENTRIES = "lookup_entries"  # the entries of all tokens in the table of a lookup layer
LOOKUP_BOUNDS = "lookup_bounds"  # where the entries of each token begin, and where the last ones end
LOOKUP_MLP = "lookup_mlp"  # hidden features of a lookup layer
LOOKUP_MIX = "lookup_mix"  # those and the residual stream, side by side

# Mesh axes.
REPLICA = "replica"
REPLICA_DCN = "replica_dcn"
DATA = "data"
CONTEXT = "context"  # the devices that share the tokens of a row
CONTEXT_HEADS = "context_heads"  # those of them that exchange tokens for heads, if others do not
MODEL = "model"
MESH_AXES = (REPLICA, DATA, MODEL)


def axes_of(spec: Any) -> tuple[haliax.Axis, ...]:
    """The axes of a field such as `Linear.In`, which holds one axis or several."""
    return (spec,) if isinstance(spec, haliax.Axis) else tuple(spec)


def axis_names(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names in an entry that holds one axis name, several or none."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
