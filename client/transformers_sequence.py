"""A cache for Transformers over memory that is there already, part of it still on its way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from transformers.cache_utils import Cache, CacheLayerMixin


class Layers(Protocol):
    """A load that each layer can be waited for by itself."""

    @property
    def done(self) -> bool:
        """Whether all layers are there."""

    def wait(self, layer: int) -> None:
        """Have the current stream wait for a layer."""

    def finish(self) -> None:
        """Wait on the host until all layers are there."""


class Arriving:
    """A prefix on its way into memory.

    Args:
        layers: the load.
        close: lets go of the blocks it reads; whether they were what was stored until then.
    """

    def __init__(self, layers: Layers, close: Callable[[], bool]) -> None:
        self._layers = layers
        self._close = close
        self._lock = threading.Lock()
        self._sound: bool | None = None

    @property
    def done(self) -> bool:
        """Whether all of it is there."""
        return self._sound is not None or self._layers.done

    def wait(self, layer: int) -> None:
        """Have the current stream wait for a layer; the host does not wait."""
        self._layers.wait(layer)

    def finish(self) -> bool:
        """Wait on the host until all is there, and let go of the blocks.

        Returns:
            Whether it is what was stored. May be called again.
        """
        with self._lock:
            if self._sound is None:
                try:
                    self._layers.finish()
                finally:
                    self._sound = self._close()
            return self._sound


class SequenceLayer(CacheLayerMixin):
    """The keys and values of one layer, written where they stay.

    Args:
        rows: memory for keys and values, ``[1, KV heads, tokens, dim]``, with any strides.
        length: tokens of it that are taken.
        arrived: called before the first use of them.
    """

    is_compileable = False
    is_sliding = False

    def __init__(
        self, rows: tuple[Any, Any], length: int, arrived: Callable[[], object] | None
    ) -> None:
        CacheLayerMixin.__init__(self)
        self._rows = rows
        self._arrived = arrived
        self._left: int | None = None
        self.is_initialized = True
        self.dtype, self.device = rows[0].dtype, rows[0].device
        self.resize(length)

    def resize(self, length: int) -> None:
        """Show so many tokens."""
        self._length = length
        self.keys, self.values = (rows[:, :, :length] for rows in self._rows)

    @property
    def kept(self) -> int:
        """Tokens that are in the memory given."""
        return self._length if self._left is None else self._left

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Nothing: the memory is there."""

    def update(
        self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Append tokens; a sequence that outgrows its memory moves to some of its own.

        Args:
            key_states: ``[1, KV heads, new tokens, dim]``.
            value_states: likewise.
            args: not used.
            kwargs: not used.

        Returns:
            All keys and values so far.
        """
        if self._arrived is not None:
            self._arrived()
            self._arrived = None
        start, stop = self._length, self._length + key_states.shape[2]
        if stop > self._rows[0].shape[2]:
            self._left = self.kept
            self._rows = (_grown(self.keys, stop), _grown(self.values, stop))
        for rows, states in zip(self._rows, (key_states, value_states), strict=True):
            rows[:, :, start:stop].copy_(states)
        self.resize(stop)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All tokens, counted from 0."""
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self._length

    def get_max_length(self) -> int:
        """None: it moves."""
        return -1

    def reset(self) -> None:
        """Forget all tokens."""
        self._left = None if self._left is None else 0
        self.resize(0)


class SequenceCache(Cache):
    """The KV of one sequence, for ``past_key_values`` of a model.

    Args:
        rows: memory of each layer, as ``SequenceLayer`` takes it.
        sequence: which sequence of the memory it is.
        hashes: of the blocks that it begins with.
        tokens: of these blocks.
        arriving: the load that brings them; ``None`` where there are none.

    Attributes:
        sequence: as above.
        hashes: as above.
    """

    def __init__(
        self,
        rows: Sequence[tuple[Any, Any]],
        sequence: int,
        hashes: Sequence[bytes] = (),
        tokens: int = 0,
        arriving: Arriving | None = None,
    ) -> None:
        self.sequence = sequence
        self.hashes = hashes
        self._arriving = arriving

        def waiting(number: int) -> Callable[[], object] | None:
            return None if arriving is None else lambda: arriving.wait(number)

        mine = [SequenceLayer(each, tokens, waiting(n)) for n, each in enumerate(rows)]
        Cache.__init__(self, layers=list(mine))
        self._mine = mine

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Append tokens to a layer; see ``SequenceLayer.update``."""
        if layer_idx == 0 and self._arriving is not None and self._arriving.done:
            # From the second token on, as a rule: the blocks are not held longer than that.
            self._arriving.finish()
        found: tuple[Any, Any] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return found

    @property
    def kept(self) -> int:
        """Tokens that are in the memory given; later ones are not, once it was too small."""
        return self._mine[0].kept

    @property
    def arrived(self) -> bool:
        """Whether what was loaded is there."""
        return self._arriving is None or self._arriving.done

    def finish(self) -> bool:
        """Wait on the host for what was loaded, and let go of the blocks in the store.

        Call it when the first token has been read: then there is nothing left to wait for.

        Returns:
            Whether what was loaded is what the store held. If not, the node was lost meanwhile,
            and nothing that was computed from it may be used.
        """
        return self._arriving is None or self._arriving.finish()

    def forget(self) -> None:
        """Begin anew with nothing, in the same memory."""
        self.finish()
        self.hashes = ()
        for layer in self._mine:
            layer.reset()


def _grown(states: Any, tokens: int) -> Any:
    """States in new memory with room for twice as many tokens."""
    shape = list(states.shape)
    shape[2] = 2 * tokens
    grown = states.new_empty(shape)
    grown[:, :, : states.shape[2]].copy_(states)
    return grown
