"""Layers of multi-token prediction for transformers' models, which train none: a reference made from DeepSeek-V3's formulas
(section 2.2, equations 21 to 25), with the names of the published weights and, as in these, states read behind the norm.
Of DeepSeek-V4 it is made from the published inference code (`MTPBlock`): a layer reads the residual streams before the head,
each joined with the embedding by two projections, sees a window alone, and has its own weights of the head's streams.
"""
import copy

import torch
from torch import nn


def attach_predictions(model, count):
    """Gives the model `count` layers of multi-token prediction, which are saved with its weights."""
    if model.config.model_type == "deepseek_v4":
        model.mtp = nn.ModuleList(_of_streams(model) for _ in range(count))
        return
    if hasattr(model.config, "linear_num_key_heads"):
        assert count == 1, "its one norm is of all layers"
        model.mtp = _apart(model, count)
        return
    first = len(model.model.layers)
    for idx in range(first, first + count):
        model.model.layers.append(_behind(model, idx))


def has_predictions(model):
    return hasattr(model, "mtp") or len(model.model.layers) > model.config.num_hidden_layers


def _parts(model):
    """Norms of embeddings and of states, the projection of both, and the norm before the head."""
    size = model.config.hidden_size

    def norm():
        return type(model.model.norm)(size, eps=model.config.rms_norm_eps)
    return norm(), norm(), nn.Linear(2 * size, size, bias=False), norm()


def _behind(model, idx):
    """DeepSeek-V3's and GLM-4.5's: a decoder layer behind the last one and like it, with more modules."""
    config = copy.deepcopy(model.config)
    for key in ("layer_types", "mlp_layer_types"):
        types = getattr(config, key, None)
        if types is not None:
            setattr(config, key, types + types[-1:] * (idx + 1 - len(types)))
    layer = type(model.model.layers[0])(config, idx)
    layer.enorm, layer.hnorm, layer.eh_proj, norm = _parts(model)
    layer.shared_head = nn.Module()
    layer.shared_head.norm = norm
    return layer


def _apart(model, count):
    """Qwen3-Next's: a module beside the model."""
    mtp = nn.Module()
    mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.fc, mtp.norm = _parts(model)
    config = copy.deepcopy(model.config)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    mtp.layers = nn.ModuleList(type(model.model.layers[0])(config, idx) for idx in range(count))
    return mtp


def _of_streams(model):
    """DeepSeek-V4's: a decoder layer with modules beside its own, which sees a window and has experts without a table."""
    config = copy.deepcopy(model.config)
    config.layer_types, config.mlp_layer_types = ["sliding_attention"], ["moe"]
    layer = type(model.model.layers[0])(config, 0)
    layer.enorm, layer.hnorm, _, layer.norm = _parts(model)
    size = config.hidden_size
    layer.e_proj, layer.h_proj = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)
    layer.hc_head = type(model.model.hc_head)(config)
    return layer


def _modules(model):
    """Of each layer: norm of embeddings, norm of states, projection, decoder layer, norm before the head."""
    if hasattr(model, "mtp"):
        mtp = model.mtp
        return [(mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.fc, mtp.layers[0], mtp.norm)]
    behind = model.model.layers[model.config.num_hidden_layers:]
    return [(layer.enorm, layer.hnorm, layer.eh_proj, layer, layer.shared_head.norm) for layer in behind]


def _streams_before_head(base, ids):
    held = []
    handle = base.hc_head.register_forward_pre_hook(lambda _, inputs: held.append(inputs[0]))
    base(input_ids=ids)
    handle.remove()
    return held[0]


def _next_token_loss(model, states, ids, shift):
    """Summed over the tokens `shift` further on than the next."""
    logits = model.lm_head(states[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, shift + 1:].flatten(), reduction="sum")


def _stream_prediction_loss(model, ids):
    base = model.model
    state = _streams_before_head(base, ids)
    total = 0
    for shift, layer in enumerate(model.mtp, start=1):
        length = ids.shape[1] - shift
        embedded = layer.enorm(base.embed_tokens(ids[:, shift:]))
        joined = layer.e_proj(embedded).unsqueeze(2) + layer.h_proj(layer.hnorm(state[:, :length]))
        positions = torch.arange(length)[None]
        seen = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - model.config.sliding_window)
        mask = torch.zeros(length, length).masked_fill(~seen, torch.finfo(joined.dtype).min)[None, None]
        rotation = {"main": base.rotary_emb(embedded, position_ids=positions, layer_type="main")}
        state = layer(joined, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        total = total + _next_token_loss(model, layer.norm(layer.hc_head(state)), ids, shift)
    return total / len(model.mtp) / ids[:, 1:].numel()


def prediction_loss(model, ids):
    """The mean of the layers' losses, each divided by the labels of the model's own."""
    if model.config.model_type == "deepseek_v4":
        return _stream_prediction_loss(model, ids)
    base = model.model
    state = base(input_ids=ids).last_hidden_state
    total = 0
    modules = _modules(model)
    for shift, (embed_norm, state_norm, projection, layer, head_norm) in enumerate(modules, start=1):
        length = ids.shape[1] - shift
        embedded = base.embed_tokens(ids[:, shift:])
        joined = projection(torch.cat([embed_norm(embedded), state_norm(state[:, :length])], dim=-1))
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), torch.finfo(joined.dtype).min).triu(1)[None, None]
        output = layer(joined, attention_mask=mask, position_ids=positions,
                       position_embeddings=base.rotary_emb(joined, positions))
        state = head_norm(output)
        total = total + _next_token_loss(model, state, ids, shift)
    return total / len(modules) / ids[:, 1:].numel()


def copied_tables(model):
    """Tables of the model that the published files repeat in each layer of multi-token prediction, by name."""
    if not has_predictions(model) or hasattr(model, "mtp"):
        return {}
    layers = range(model.config.num_hidden_layers, len(model.model.layers))
    return {f"model.layers.{idx}.{name}": original for idx in layers
            for name, original in (("embed_tokens.weight", "model.embed_tokens.weight"),
                                   ("shared_head.head.weight", "lm_head.weight"))}
