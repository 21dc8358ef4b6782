"""Hugging Face's config.json as a model: its names and its features, those that can't be described refused by name.

What each family of models means stands in ``families``; here is what they share.
The same names are read in the job's own ``model`` section, so that a config.json may be pasted there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threefold.errors import JobError
from threefold.job.families import FAMILIES, UNKNOWN, Family, Model
from threefold.job.files import check_plain, read_settings
from threefold.job.messages import Findings, choices, nearest_word, printable, show
from threefold.job.presets import presets
from threefold.job.spec import ModelSpec

_RENAMES: Mapping[str, str] = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_ctx": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "norm_eps",
    "rms_norm_eps": "norm_eps",
    "attention_dropout": "attn_pdrop",
    "activation_function": "hidden_act",
}
_SAME_ACTIVATION: Mapping[str, str] = {"gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new", "swish": "silu"}

# Features that change the model and that threefold does not do, with the values that switch them off.
_OFF_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "auto_map": (None,),
    "is_encoder_decoder": (False,),
    "layer_types": (None,),
    "mlp_bias": (False,),
    "num_local_experts": (None, 1),
    "partial_rotary_factor": (None, 1, 1.0),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "reorder_and_upcast_attn": (False,),
    "rope_parameters": (None,),
    "rope_scaling": (None,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "sliding_window": (None,),
    "tie_encoder_decoder": (False,),
    "use_sliding_window": (False,),
}

# What a feature is, where its name and value don't say so.
_MEANINGS: Mapping[str, str] = {"sliding_window": "attention over a window of so many tokens"}

# Keys about files, tokens, generation and other heads: nothing that pretraining computes depends on them.
_NO_EFFECT_NAMES = """
    _attn_implementation _name_or_path architectures attn_implementation bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id dtype eos_token_id finetuning_task id2label is_decoder
    keys_to_ignore_at_inference label2id model_name n_special num_labels output_attentions output_hidden_states
    output_past pad_token_id prefix predict_special_tokens pretraining_tp problem_type return_dict sep_token_id
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params tokenizer_class torch_dtype torchscript transformers_version unk_token_id use_bfloat16
    use_cache use_return_dict
"""
_NO_EFFECT = frozenset(_NO_EFFECT_NAMES.split())

# Null is Hugging Face's way of saying: the default.
_NULLABLE = frozenset(
    {"intermediate_size", "num_key_value_heads", "head_dim", "preset", "hf", "q_lora_rank", "n_shared_experts"}
)


def resolve_model(settings: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """``settings`` with the model's preset or Hugging Face directory replaced by its numbers, the job's own winning.

    A model that can't be resolved is reported and left out.
    """
    model = settings.get("model")
    if not isinstance(model, Mapping):
        return dict(settings)
    own = _translated(model, _Source(), findings)
    base = _base(own, findings)
    if base is None:
        return {key: value for key, value in settings.items() if key != "model"}
    whole = {**base, **{key: value for key, value in own.items() if key != "hf"}}
    return {**settings, "model": whole}


def _base(own: Model, findings: Findings) -> Model | None:
    """The numbers to start from; None when they can't be had."""
    preset, directory = own.get("preset"), own.get("hf")
    if preset is not None and directory is not None:
        findings.problem(
            "model.hf", "a model starts from hf or from preset, not both", "remove model.hf or model.preset"
        )
        return None
    if directory is not None:
        return _from_directory(directory, findings)
    return {} if preset is None else _from_preset(preset, findings)


def _from_preset(name: Any, findings: Findings) -> Model | None:
    if isinstance(name, str) and name in presets():
        return dict(presets()[name])
    meant = nearest_word(name, presets()) if isinstance(name, str) else None
    fix = f"write {show(meant)}" if meant else "write one of them, or the model's own numbers"
    known = ", ".join(presets())
    findings.problem("model.preset", f"{show(name)} is not a known model; known are {known}", fix)
    return None


def _from_directory(directory: Any, findings: Findings) -> Model | None:
    if not isinstance(directory, str) or not directory:
        findings.problem(
            "model.hf", f"{show(directory)} is not a directory", 'write its path in quotes, such as "gpt2"'
        )
        return None
    path = Path(directory)
    path = path / "config.json" if path.name != "config.json" else path
    try:
        config = read_settings(path)
        odd = check_plain(config)
    except JobError as error:
        config, odd = {}, error.problems
    for problem in odd:
        findings.problem("model.hf", f"{problem.key}: {problem.message}", problem.fix)
    return None if odd else _from_config(config, str(path), findings)


def _from_config(config: Model, where: str, findings: Findings) -> Model | None:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        message = f"model_type {show(model_type)} in {printable(where)} is not one of {choices(FAMILIES)}"
        findings.problem("model.hf", message, f"name a config of model_type {choices(FAMILIES)}")
        return None
    seen = len(findings.problems)
    translated = _translated(config, _Source(where), findings)
    _refuse_unknown(translated, where, findings)
    if FAMILIES[model_type].plain:
        _refuse_unusual(translated, model_type, findings)
    return None if len(findings.problems) > seen else {**FAMILIES[model_type].left_out, **translated}


def _refuse_unknown(translated: Model, where: str, findings: Findings) -> None:
    for name in sorted(translated.keys() - ModelSpec.model_fields.keys()):
        message = f"{printable(where)} has {show(name)}, and whether it changes the model is not known"
        findings.problem("model.hf", message, f"remove {show(name)} from it if the model does not depend on it")


def _refuse_unusual(translated: Model, model_type: str, findings: Findings) -> None:
    """A config of a plain style that states what models of that style don't have was probably made for another one."""
    hidden, heads = translated.get("hidden_size"), translated.get("num_attention_heads")
    stated = translated.get("head_dim")
    if stated is not None and isinstance(hidden, int) and isinstance(heads, int) and heads and stated != hidden / heads:
        message = f"{show(stated)} is not hidden_size / num_attention_heads = {hidden} / {heads} = {hidden / heads:g}"
        findings.problem("model.head_dim", message, "remove it, or set model.hidden_size to heads × head_dim")
    activation = translated.get("hidden_act")
    if activation in ("relu", "relu2"):
        message = f"{show(activation)} is not an activation of model_type {model_type}"
        findings.problem("model.hidden_act", message, "leave it out, or state the model's numbers in the job itself")


@dataclass(frozen=True)
class _Source:
    """Where a model's keys stand: in the job's own ``model`` section, or in the config file at ``path``."""

    path: str | None = None

    def problem(self, name: str, message: str, fix: str, findings: Findings) -> None:
        if self.path is None:
            findings.problem(f"model.{name}", message, fix)
        else:
            findings.problem("model.hf", f"{printable(name)} in {printable(self.path)}: {message}", fix)


def _translated(model: Mapping[str, Any], source: _Source, findings: Findings) -> Model:
    """``model`` in the job's own names, without keys that mean nothing here; features that are not done are refused."""
    family = _family_of(model)
    translated: Model = dict(family.has)
    for name, value in _with_flat_rope(family.read(dict(model))).items():
        own_name = family.renames.get(name, _RENAMES.get(name, name))
        if name in _NO_EFFECT or name in family.no_effect.split():
            if source.path is None:
                findings.notes.append(f"model.{printable(name)}: has no effect on the model")
        elif _is_feature(name, value, family, source):
            _refuse_feature(name, value, family, source, findings)
        elif value is None and own_name in _NULLABLE:
            continue
        elif own_name in translated and translated[own_name] != value:
            message = f"{show(value)} contradicts {own_name} {show(translated[own_name])}; they are the same number"
            source.problem(name, message, f"keep one of {name} and {own_name}", findings)
        else:
            translated[own_name] = family.style if name == "model_type" and family.style else value
    return _with_known_activation(translated)


def _family_of(model: Mapping[str, Any]) -> Family:
    model_type = model.get("model_type")
    return FAMILIES.get(model_type, UNKNOWN) if isinstance(model_type, str) else UNKNOWN


def _is_feature(name: str, value: Any, family: Family, source: _Source) -> bool:
    """Whether ``name`` is a switch for something that is not done. A job may state experts with any style."""
    if name == "num_local_experts":
        stated_here = source.path is None and not _is_off(value, _OFF_VALUES[name])
        return not (family.has_experts or stated_here)
    if name == "rope_scaling":
        return not (value is None or (isinstance(value, Mapping) and value.get("rope_type") == "llama3"))
    return name in _OFF_VALUES or name in family.off


def _with_flat_rope(model: Mapping[str, Any]) -> Model:
    """Newer config files keep rope_theta and the scaling in rope_parameters; type default scales nothing."""
    flat = dict(model)
    for name in ("rope_parameters", "rope_scaling"):
        rope = flat.get(name)
        kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, Mapping) else None
        if not isinstance(rope, Mapping) or not (_scales_nothing(kind, rope) or kind == "llama3"):
            continue
        del flat[name]
        flat |= {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
        if kind == "llama3":
            rest = {key: value for key, value in rope.items() if key not in ("type", "rope_type", "rope_theta")}
            flat["rope_scaling"] = {"rope_type": kind, **rest}
    return flat


def _scales_nothing(kind: Any, rope: Mapping[str, Any]) -> bool:
    return kind in (None, "default") and rope.keys() <= {"rope_type", "type", "rope_theta"}


def _with_known_activation(model: Model) -> Model:
    activation = model.get("hidden_act")
    if isinstance(activation, str) and activation in _SAME_ACTIVATION:
        return {**model, "hidden_act": _SAME_ACTIVATION[activation]}
    return model


def _refuse_feature(name: str, value: Any, family: Family, source: _Source, findings: Findings) -> None:
    off = family.off.get(name) or _OFF_VALUES[name]
    if not _is_off(value, off):
        feature = f"{_MEANINGS[name]}, which" if name in _MEANINGS else "a model feature that"
        message = f"{show(value)} asks for {feature} threefold does not have"
        source.problem(name, message, f"train without it: set {name} to {show(off[0])}", findings)


def _is_off(value: Any, off: tuple[Any, ...]) -> bool:
    return any(value == harmless and type(value) is type(harmless) for harmless in off)
