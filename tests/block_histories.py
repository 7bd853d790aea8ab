"""A naive model of sequences that share blocks: it keeps every token of every slot, and predicts each call.

Each slot of the simulated pool holds (content, write): content names the token and all before it,
write is a number that no other write has, so that equal content computed twice is told apart. What a
sequence sees is remembered when it is stored and must never change. The model knows nothing of hashes,
reference counts or chains: who owns a block is counted in the tables, whenever it matters.
"""

from __future__ import annotations

import dataclasses

import pytest

from torch_pagedkv.cache import BlockManager, OutOfBlocks, blocks_for

NO_BLOCK = -1


@dataclasses.dataclass
class Modelled:
    """What a sequence must look like."""

    extra_key: object
    tokens: list[int]
    seen: list  # the (content, write) of each stored token
    reserved: int = 0
    swapped: dict[int, tuple] | None = None  # logical block -> (host block, registration or None)
    spare: int = 0  # blocks past those of its tokens


class History:
    """Make calls of a BlockManager and hold each one against the model."""

    def __init__(self, num_blocks=6, block_size=3, num_host_blocks=5, sliding_window=None, prefix_caching=True):
        self.size, self.window, self.caching = block_size, sliding_window, prefix_caching
        self.manager = BlockManager(
            num_blocks,
            block_size,
            num_host_blocks=num_host_blocks,
            sliding_window=sliding_window,
            prefix_caching=prefix_caching,
        )
        self.pool = [[None] * block_size for _ in range(num_blocks)]
        self.host = [[None] * block_size for _ in range(num_host_blocks)]
        self.live: dict[int, Modelled] = {}
        self.dead: set[int] = set()
        self.found: dict[tuple, tuple[int, int]] = {}  # content of a block's end -> (block, registration)
        self.idle: list[int] = []  # found blocks in no table, the next to be evicted first
        self.num_writes = self.num_registrations = 0
        self.num_hits = self.num_copies = self.num_refused = self.num_evicted = 0

    # What is known from the tables alone.

    def table(self, number):
        return self.manager.block_table(number)

    def owners(self):
        counts = [0] * len(self.pool)
        for number, sequence in self.live.items():
            if sequence.swapped is None:
                for block in self.table(number):
                    if block != NO_BLOCK:
                        counts[block] += 1
        return counts

    def unseen(self, num_stored):
        return 0 if self.window is None else max(0, num_stored - self.window + 1) // self.size

    def contents(self, sequence):
        """The content after each token: a name for the token and all before it."""
        return [(sequence.extra_key, *sequence.tokens[: i + 1]) for i in range(len(sequence.tokens))]

    def num_free(self):
        return self.owners().count(0) - len(self.idle)

    def available(self):
        return self.owners().count(0)

    # Calls.

    def refused(self, error, call, *arguments):
        """A refused call raises a sentence and changes nothing."""
        before = self.state()
        with pytest.raises(error) as caught:
            call(*arguments)
        assert " must " in str(caught.value) and f"BlockManager.{call.__name__}: " in str(caught.value)
        assert self.state() == before
        self.num_refused += 1

    def state(self):
        manager = self.manager
        tables = {n: (self.table(n), manager.num_stored(n)) for n, s in self.live.items() if s.swapped is None}
        counts = [manager.ref_count(block) for block in range(len(self.pool))]
        return tables, counts, manager.num_free, manager.num_cached, manager.num_host_free

    def add(self, tokens, extra_key=None):
        usable = 0
        for count in range(1, (max(len(tokens) - 1, 0)) // self.size + 1):
            ends = [(extra_key, *tokens[: (i + 1) * self.size]) for i in range(self.unseen(count * self.size), count)]
            known = self.known_chain(extra_key, tokens, count)
            if self.caching and known and all(end in self.found for end in ends):
                usable = count
        number = self.manager.add(tokens, extra_key)
        stored = usable * self.size
        assert self.manager.num_stored(number) == stored
        sequence = self.live[number] = Modelled(extra_key, list(tokens[:stored]), [None] * stored)
        self.num_hits += usable
        for i, block in enumerate(self.table(number)):
            if i < self.unseen(stored):
                assert block == NO_BLOCK
                continue
            end = (extra_key, *tokens[: (i + 1) * self.size])
            assert block == self.found[end][0]
            sequence.seen[i * self.size : (i + 1) * self.size] = self.pool[block]
            if block in self.idle:
                self.idle.remove(block)
        return number

    def known_chain(self, extra_key, tokens, count):
        """A released block may be missing, but only if someone still knows that its tokens were once stored.

        With a window of one block or less nothing needs to be there, and a prefix that nobody knows
        is never taken for stored.
        """
        prefix = (extra_key, *tokens[: count * self.size])
        names = [(s.extra_key, *s.tokens) for s in self.live.values()] + list(self.found)
        return any(name[: len(prefix)] == prefix for name in names)

    def fork(self, number):
        sequence = self.live.get(number)
        if sequence is None or sequence.swapped is not None or sequence.reserved:
            return self.refused(ValueError, self.manager.fork, number)
        child = self.manager.fork(number)
        self.live[child] = dataclasses.replace(
            sequence, tokens=sequence.tokens.copy(), seen=sequence.seen.copy(), spare=0
        )
        assert self.table(child) == self.table(number)[: blocks_for(len(sequence.tokens), self.size)]
        return child

    def reserve(self, number, num_tokens):
        sequence = self.live.get(number)
        if sequence is None or sequence.swapped is not None or num_tokens < 0:
            return self.refused(ValueError, self.manager.reserve, number, num_tokens)
        table, stored = self.table(number), len(sequence.tokens)
        owners = self.owners()
        tail = stored // self.size
        copies = num_tokens > 0 and stored % self.size > 0 and owners[table[tail]] > 1
        needed = max(0, blocks_for(stored + num_tokens, self.size) - len(table)) + copies
        if needed > owners.count(0):
            return self.refused(OutOfBlocks, self.manager.reserve, number, num_tokens)
        self.evict(needed)
        pairs = self.manager.reserve(number, num_tokens)
        after = self.table(number)
        assert len(pairs) == copies
        for source, destination in pairs:
            assert (source, destination) == (table[tail], after[tail]) and owners[destination] == 0
            self.pool[destination] = list(self.pool[source])
            table[tail] = destination
        assert after[: len(table)] == table and len(after) >= blocks_for(stored + num_tokens, self.size)
        sequence.reserved = num_tokens
        self.num_copies += len(pairs)

    def commit(self, number, tokens):
        """Write all that was reserved, as the model would, and commit the first tokens of it."""
        sequence = self.live.get(number)
        if sequence is None or sequence.swapped is not None or len(tokens) > sequence.reserved:
            return self.refused(ValueError, self.manager.commit, number, tokens)
        table, stored, owners = self.table(number), len(sequence.tokens), self.owners()
        sequence.tokens += tokens
        contents = self.contents(sequence)
        for position in range(stored, stored + sequence.reserved):
            block = table[position // self.size]
            assert owners[block] == 1 and self.manager.ref_count(block) == 1
            self.num_writes += 1
            content = contents[position] if position < len(contents) else "rejected"
            self.pool[block][position % self.size] = (content, self.num_writes)
            if position < len(contents):
                sequence.seen.append((content, self.num_writes))
        self.manager.commit(number, tokens)
        sequence.reserved = 0
        full = range(stored // self.size, len(sequence.tokens) // self.size)
        self.register({i: table[i] for i in full}, contents)
        self.let_go(table[: self.unseen(len(sequence.tokens))])

    def free(self, number):
        sequence = self.live.get(number)
        if sequence is None:
            return self.refused(ValueError, self.manager.free, number)
        table = self.table(number) if sequence.swapped is None else []
        self.manager.free(number)
        del self.live[number]
        self.dead.add(number)
        self.let_go(table)

    def swap_out(self, number):
        sequence = self.live.get(number)
        if sequence is None or sequence.swapped is not None:
            return self.refused(ValueError, self.manager.swap_out, number)
        table, stored = self.table(number), len(sequence.tokens)
        kept = range(self.unseen(stored), blocks_for(stored, self.size))
        if len(kept) > self.host_free():
            return self.refused(OutOfBlocks, self.manager.swap_out, number)
        pairs = self.manager.swap_out(number)
        assert [block for block, _ in pairs] == [table[i] for i in kept]
        registered = {block: registration for block, registration in self.found.values()}
        sequence.swapped = {}
        for i, (block, host) in zip(kept, pairs):
            self.host[host] = list(self.pool[block])
            sequence.swapped[i] = (host, registered.get(block))
        sequence.reserved = 0
        self.let_go(table)

    def swap_in(self, number):
        sequence = self.live.get(number)
        if sequence is None or sequence.swapped is None:
            return self.refused(ValueError, self.manager.swap_in, number)
        contents = self.contents(sequence)
        kept = {}
        for i, (_, registration) in sequence.swapped.items():
            end = contents[min((i + 1) * self.size, len(contents)) - 1]
            if registration is not None and self.found.get(end, (None, None))[1] == registration:
                kept[i] = self.found[end][0]
        needed = len(sequence.swapped) - len(kept)
        if needed > self.available() - sum(block in self.idle for block in kept.values()):
            return self.refused(OutOfBlocks, self.manager.swap_in, number)
        self.idle = [block for block in self.idle if block not in kept.values()]
        self.evict(needed, self.num_free_but(kept.values()))
        pairs = self.manager.swap_in(number)
        table = self.table(number)
        assert {i: table[i] for i in kept} == kept
        assert pairs == [(host, table[i]) for i, (host, _) in sequence.swapped.items() if i not in kept]
        for host, block in pairs:
            self.pool[block] = list(self.host[host])
        full = [i for i in sequence.swapped if (i + 1) * self.size <= len(sequence.tokens)]
        sequence.swapped = None
        self.register({i: table[i] for i in full}, contents)

    # What calls do to blocks that can be found.

    def register(self, blocks, contents):
        for i, block in blocks.items():
            end = contents[(i + 1) * self.size - 1]
            if self.caching and end not in self.found:
                self.num_registrations += 1
                self.found[end] = (block, self.num_registrations)

    def let_go(self, table):
        owners = self.owners()
        can_be_found = {block for block, _ in self.found.values()}
        for block in reversed(table):
            if block in can_be_found and owners[block] == 0 and block not in self.idle:
                self.idle.append(block)

    def num_free_but(self, kept):
        owners = self.owners()
        return sum(owners[b] == 0 and b not in kept for b in range(len(owners))) - len(self.idle)

    def evict(self, needed, num_free=None):
        num_free = self.num_free() if num_free is None else num_free
        for block in self.idle[: max(0, needed - num_free)]:
            self.idle.remove(block)
            self.found = {end: entry for end, entry in self.found.items() if entry[0] != block}
            self.num_evicted += 1

    def host_free(self):
        return len(self.host) - sum(len(s.swapped) for s in self.live.values() if s.swapped is not None)

    # What holds between calls.

    def check(self):
        manager, owners = self.manager, self.owners()
        can_be_found = {block for block, _ in self.found.values()}
        counts = [manager.ref_count(block) for block in range(len(self.pool))]
        assert counts == [count + (block in can_be_found) for block, count in enumerate(owners)]
        assert manager.num_cached == len(self.idle) == sum(owners[block] == 0 for block in can_be_found)
        assert manager.num_free == counts.count(0)
        assert manager.num_available == owners.count(0) == manager.num_free + manager.num_cached
        assert manager.num_host_free == self.host_free()
        for number, sequence in self.live.items():
            assert manager.num_stored(number) == len(sequence.tokens) == len(sequence.seen)
            assert manager.is_swapped_out(number) == (sequence.swapped is not None)
            self.check_what_it_sees(number, sequence)

    def check_what_it_sees(self, number, sequence):
        contents, table = self.contents(sequence), None
        unseen = self.unseen(len(sequence.tokens))
        if sequence.swapped is None:
            table = self.table(number)
            assert table[:unseen] == [NO_BLOCK] * unseen and NO_BLOCK not in table[unseen:]
        for position in range(unseen * self.size, len(sequence.tokens)):
            logical, offset = divmod(position, self.size)
            here = self.pool[table[logical]] if table else self.host[sequence.swapped[logical][0]]
            assert here[offset] == sequence.seen[position]
            assert here[offset][0] == contents[position]
