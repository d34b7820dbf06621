"""Prefix caching for Hugging Face Transformers, around ``model.generate``.

Keys are stored as the model holds them, already rotated to their positions, which is right
because a prefix hash fixes every token before a block and so its position.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from client.layout import HeadMajorLayout, KVTensors
from client.prefix import BlockClient, Prefixes, PrefixMatch
from client.results import PutResult
from kvstore.errors import InvalidRequest, KVStoreError, MissingExtra
from kvstore.identity import ExtraKey

logger = logging.getLogger("kvstore.client.transformers")


def layout_of(model: Any, block_tokens: int = 16) -> HeadMajorLayout:
    """The layout of a model's KV cache.

    Args:
        model: a causal language model of Transformers.
        block_tokens: tokens in one block.

    Raises:
        InvalidRequest: the model keeps something else than one full attention cache per layer.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
        raise InvalidRequest(f"only full attention can be cached by prefix, not {sorted(kinds)}")
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    dtype = str(model.dtype).removeprefix("torch.")
    return HeadMajorLayout(config.num_hidden_layers, heads, head_dim, dtype, block_tokens)


def can_serve(model: Any, input_ids: Any, options: dict[str, Any]) -> bool:
    """Whether a call of ``model.generate`` is one prompt that begins at its first token.

    Args:
        model: the causal language model.
        input_ids: its prompts.
        options: what else it is given.
    """
    mask = options.get("attention_mask")
    defaults = model.generation_config
    return (
        input_ids.shape[0] == 1
        and input_ids.shape[1] > 1
        and (mask is None or bool(mask.all()))
        and (options.get("num_beams", defaults.num_beams) or 1) == 1
        and (options.get("num_return_sequences", defaults.num_return_sequences) or 1) == 1
        and options.get("past_key_values") is None
        and options.get("cache_implementation", defaults.cache_implementation) is None
        and options.get("use_cache", True) is not False
    )


@dataclass(frozen=True, slots=True)
class Generation:
    """What one call of ``generate`` did.

    Attributes:
        output: what ``model.generate`` returned.
        reused: the tokens of the prompt whose KV came from the store.
        saved: what became of the blocks of prompt and output; ``None`` where none were offered, or
            are still being saved.
    """

    output: Any
    reused: PrefixMatch
    saved: PutResult | None


@dataclass(slots=True)
class CacheCounts:
    """What a prefix cache has done.

    Attributes:
        requests: calls of ``generate``.
        bypassed: those that the cache cannot serve (batches, padding, beams).
        prompt_tokens: tokens of all prompts.
        reused_tokens: those of them that were not computed again.
        stored_blocks: blocks stored.
        errors: errors of the store that the engine was kept from.
    """

    requests: int = 0
    bypassed: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    stored_blocks: int = 0
    errors: int = 0


@dataclass(slots=True)
class PrefixCache:
    """Reuses the KV of prompt prefixes across requests and processes.

    The store can only make a request faster: where it fails or is slow, the model computes.

    Args:
        client: a blocking client whose namespace is that of ``layout``.
        model: the causal language model.
        layout: ``layout_of(model)`` where left out.
        extra_keys: what else shapes the KV, such as a LoRA adapter.
        deadline: seconds that loading, and again saving, may take; the client's own where left
            out.

    Raises:
        InvalidRequest: the model's cache cannot be stored by prefix.
        NamespaceMismatch: the client's namespace is of another layout.
        MissingExtra: torch or transformers is not installed.
    """

    client: BlockClient
    model: Any
    layout: HeadMajorLayout | None = None
    extra_keys: Sequence[ExtraKey] = ()
    deadline: float | None = None
    counts: CacheCounts = field(default_factory=CacheCounts)
    _prefixes: Prefixes = field(init=False)
    _layout: HeadMajorLayout = field(init=False)
    _torch: Any = field(init=False)
    _cache_type: Any = field(init=False)

    def __post_init__(self) -> None:
        try:
            self._torch = import_module("torch")
            self._cache_type = import_module("transformers").DynamicCache
        except ImportError as error:
            raise MissingExtra.named("transformers", "the Transformers prefix cache") from error
        self._layout = self.layout or layout_of(self.model)
        self._prefixes = Prefixes(self.client, self._layout)

    def generate(self, input_ids: Any, **options: Any) -> Generation:
        """Call ``model.generate`` with what the store holds of the prompt, then save the rest.

        Args:
            input_ids: the whole prompt, ``[1, tokens]``. Batches, padded prompts and beam search
                are generated without the store.
            options: everything else ``model.generate`` takes.
        """
        self.counts.requests += 1
        if not can_serve(self.model, input_ids, options):
            self.counts.bypassed += 1
            output = self.model.generate(input_ids, **options)
            return Generation(output, PrefixMatch(0, {}), None)
        cache, reused = self.restore(input_ids)
        self.counts.prompt_tokens += input_ids.shape[1]
        self.counts.reused_tokens += reused.tokens
        output = self.model.generate(input_ids, past_key_values=cache, **options)
        sequences = getattr(output, "sequences", output)
        return Generation(output, reused, self.store(sequences, cache))

    def restore(self, input_ids: Any) -> tuple[Any, PrefixMatch]:
        """A cache with the KV of the longest prefix held, shorter than the prompt.

        Args:
            input_ids: the whole prompt, ``[1, tokens]``.

        Returns:
            A ``DynamicCache`` for ``model.generate`` and what it holds.
        """
        prompt = input_ids[0, :-1].tolist()
        reused = PrefixMatch(0, {})
        tensors = self._allocate(len(prompt))
        try:
            reused = self._prefixes.load(
                prompt, tensors, extra_keys=self.extra_keys, deadline=self.deadline
            )
        except KVStoreError as error:
            self._note(error)
        if not reused.tokens:
            return self._cache_type(config=self.model.config), reused
        return self._cache(tensors, reused.tokens), reused

    def store(self, sequences: Any, cache: Any) -> PutResult | None:
        """Save the full blocks that a cache holds.

        Args:
            sequences: prompt and output, ``[1, tokens]``.
            cache: the cache that ``model.generate`` filled.
        """
        try:
            tensors = [(layer.keys.cpu(), layer.values.cpu()) for layer in cache.layers]
            token_ids = sequences[0, : cache.get_seq_length()].tolist()
            saved = self._prefixes.save(
                token_ids, tensors, extra_keys=self.extra_keys, deadline=self.deadline
            )
        except KVStoreError as error:
            self._note(error)
            return None
        self.counts.stored_blocks += saved.stored
        return saved

    def _allocate(self, tokens: int) -> KVTensors:
        layout, torch = self._layout, self._torch
        shape = (1, layout.kv_heads, tokens, layout.head_dim)
        return [
            (torch.empty(shape, dtype=self.model.dtype), torch.empty(shape, dtype=self.model.dtype))
            for _ in range(layout.layers)
        ]

    def _cache(self, tensors: KVTensors, tokens: int) -> Any:
        device = self.model.device
        data = [
            (keys[:, :, :tokens].to(device), values[:, :, :tokens].to(device))
            for keys, values in tensors
        ]
        return self._cache_type(ddp_cache_data=data, config=self.model.config)

    def _note(self, error: KVStoreError) -> None:
        self.counts.errors += 1
        logger.warning("the store could not help: %s (%s)", error, error.code)
