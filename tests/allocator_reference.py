"""A slow, literal transcription of DeviceCachingAllocator (c10/cuda/CUDACachingAllocator.cpp), to compare with.

Same names, same order of statements, linked blocks and linear searches; nothing shared with planner.memory but the
settings object. One stream, no graphs. Raises MemoryError where torch raises OutOfMemoryError.
"""
# ruff: noqa: D101, D102 - each name is documented where it comes from

from __future__ import annotations

import itertools

NO_LIMIT = 1 << 63
MIB = 1 << 20
FREE, ALLOCATED, UNMAPPED = "free", "allocated", "unmapped"


class Block:
    def __init__(self, pool, ptr, size, state=FREE):
        self.pool, self.ptr, self.size, self.state = pool, ptr, size, state
        self.prev = self.next = None
        self.gc_count_base = 0

    @property
    def gc_count(self):
        return self.pool.get_free_blocks_call_count - self.gc_count_base

    @property
    def is_split(self):
        return bool(self.prev or self.next)

    def splice(self, before, after):
        if before:
            before.next = self
        self.prev = before
        if after:
            after.prev = self
        self.next = after


class Pool:
    def __init__(self, is_small):
        self.is_small, self.blocks, self.unmapped = is_small, [], []
        self.get_free_blocks_call_count = 0

    def insert_into_blocks(self, block):
        block.gc_count_base = self.get_free_blocks_call_count
        self.blocks.append(block)

    def ordered(self):
        return sorted(self.blocks, key=lambda b: (b.size, b.ptr))


class Reference:
    def __init__(self, settings, capacity=None):
        self.s, self.capacity = settings, capacity
        self.max_split = settings.max_split_size_bytes or NO_LIMIT
        self.max_non_split_rounding = settings.max_non_split_rounding_bytes or settings.large_segment_size_bytes
        self.small, self.large = Pool(True), Pool(False)
        self.active = {}
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.retries = 0
        self.next_ptr = 0

    def malloc(self, key, nbytes):
        size = self.round_size(nbytes)
        pool = self.small if size <= MIB else self.large
        block = self.get_free_block(pool, size)
        if not block and self.s.garbage_collection_bytes is not None:
            self.garbage_collect_cached_blocks()
        block = (
            block
            or self.alloc_block(pool, size)
            or (self.release_available_cached_blocks(pool, size) and self.alloc_block(pool, size))
            or (self.release_cached_blocks() and self.alloc_block(pool, size, is_retry=True))
        )
        if not block:
            raise MemoryError
        if self.should_split(block, size):
            remaining = block
            block = Block(pool, remaining.ptr, size)
            block.splice(remaining.prev, remaining)
            remaining.ptr += size
            remaining.size -= size
            pool.insert_into_blocks(remaining)
        block.state = ALLOCATED
        self.active[key] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, key):
        block = self.active.pop(key)
        self.allocated -= block.size
        block.state = FREE
        self.try_merge(block, block.prev)
        self.try_merge(block, block.next)
        block.pool.insert_into_blocks(block)

    def layout(self):
        blocks = [*self.active.values(), *self.small.blocks, *self.large.blocks]
        segments = []
        for head in sorted(blocks, key=lambda b: b.ptr):
            if head.prev and head.prev.state != UNMAPPED:
                continue
            chain = itertools.takewhile(lambda b: b.state != UNMAPPED, self.chain(head))
            segments.append([(b.size, b.state == ALLOCATED) for b in chain])
        return segments

    @staticmethod
    def chain(block):
        while block:
            yield block
            block = block.next

    def round_size(self, size):
        if size < 512:
            return 512
        divisions = self.roundup_power2_divisions(size)
        if divisions > 1 and size > 512 * divisions:
            if size & (size - 1) == 0:
                return size
            power2_floor = 1 << (size.bit_length() - 1)
            power2_division = power2_floor >> (divisions.bit_length() - 1)
            round_size_floor = size & ~(power2_division - 1)
            return size if round_size_floor == size else round_size_floor + power2_division
        return 512 * ((size + 511) // 512)

    def roundup_power2_divisions(self, size):
        divisions = self.s.roundup_power2_divisions
        if isinstance(divisions, int):
            divisions = [divisions] * 16
        log_size = size.bit_length() - 1
        index = log_size - 20 if log_size > 20 else 0
        return divisions[min(index, 15)]

    def should_split(self, block, size):
        remaining = block.size - size
        if block.pool.is_small or self.s.expandable_segments:
            return remaining >= 512
        return size < self.max_split and remaining > MIB

    def get_allocation_size(self, size):
        if size <= MIB:
            return 2 * MIB
        if size < 10 * MIB:
            return self.s.large_segment_size_bytes
        return 2 * MIB * ((size + 2 * MIB - 1) // (2 * MIB))

    def get_free_block(self, pool, size):
        pool.get_free_blocks_call_count += 1
        blocks = [b for b in pool.ordered() if b.size >= size]
        if not blocks:
            return None
        it = 0
        if self.s.expandable_segments:

            def expandable_size(b):
                return b.size + (b.next.size if b.next and b.next.state == UNMAPPED else 0)

            while it + 1 < len(blocks) and expandable_size(blocks[it + 1]) < expandable_size(blocks[it]):
                it += 1
        found = blocks[it]
        if size < self.max_split and found.size >= self.max_split:
            return None
        if size >= self.max_split and found.size >= size + self.max_non_split_rounding:
            return None
        pool.blocks.remove(found)
        return found

    def take(self, size):
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def alloc_block(self, pool, size, is_retry=False):
        self.retries += is_retry
        if self.s.expandable_segments:
            return self.try_allocate_expandable_block(pool, size)
        alloc_size = self.get_allocation_size(size)
        if not self.take(alloc_size):
            return None
        return Block(pool, self.new_ptr(alloc_size), alloc_size)

    def new_ptr(self, size):
        ptr = self.next_ptr
        self.next_ptr = ptr + (size // MIB + 64) * MIB * 100
        return ptr

    def try_merge(self, dst, src):
        if not src or src.state == ALLOCATED or src.state != dst.state:
            return
        if dst.prev is src:
            dst.ptr = src.ptr
            dst.splice(src.prev, dst.next)
        else:
            dst.splice(dst.prev, src.next)
        dst.size += src.size
        (dst.pool.unmapped if src.state == UNMAPPED else dst.pool.blocks).remove(src)

    def release_block(self, block):
        self.reserved -= block.size
        block.pool.blocks.remove(block)

    def release_available_cached_blocks(self, pool, size):
        if self.max_split == NO_LIMIT or self.s.expandable_segments:
            return False
        key = max(size, self.max_split)
        fits = [b for b in pool.ordered() if b.size >= key]
        if fits:
            self.release_block(fits[0])
            return True
        total_released = 0
        for block in reversed(pool.ordered()):
            if total_released >= key or block.size < self.max_split:
                break
            total_released += block.size
            self.release_block(block)
        return total_released >= key

    def garbage_collect_cached_blocks(self):
        gc_threshold = self.s.garbage_collection_bytes
        if self.reserved <= gc_threshold:
            return
        target_size = self.reserved - gc_threshold
        gc_reclaimed = 0
        total_age = freeable_block_count = 0
        for b in self.large.blocks:
            if not b.is_split:
                total_age += b.gc_count
                freeable_block_count += 1
        if freeable_block_count == 0:
            return
        block_freed = True
        while gc_reclaimed < target_size and block_freed and freeable_block_count > 0:
            age_threshold = total_age / freeable_block_count
            block_freed = False
            for block in self.large.ordered():
                if not block.is_split and not self.s.expandable_segments and block.gc_count >= age_threshold:
                    block_freed = True
                    gc_reclaimed += block.size
                    total_age -= block.gc_count
                    freeable_block_count -= 1
                    self.release_block(block)

    def release_cached_blocks(self):
        for pool in (self.large, self.small):
            for block in pool.ordered():
                if self.s.expandable_segments:
                    self.unmap_block(block)
                    if not block.prev and not block.next:
                        pool.unmapped.remove(block)
                elif not block.prev and not block.next:
                    self.release_block(block)
        return True

    # Expandable segments.

    def granule(self, pool):
        return 2 * MIB if pool.is_small else self.s.large_segment_size_bytes

    def find_expandable_block(self, pool, size):
        for c in sorted(pool.unmapped, key=lambda b: b.ptr):
            start = c.prev if c.prev and c.prev.state != ALLOCATED else c
            room = sum(b.size for b in itertools.takewhile(lambda b: b.state != ALLOCATED, self.chain(start)))
            if room >= size:
                return start
        total = 1 << 60 if self.capacity is None else self.capacity + self.capacity // 8
        granule = self.granule(pool)
        span = (total + granule - 1) // granule * granule
        candidate = Block(pool, self.next_ptr, span, UNMAPPED)
        self.next_ptr += span * 100
        pool.unmapped.append(candidate)
        return candidate

    def map_block(self, to_map, size):
        pool, granule = to_map.pool, self.granule(to_map.pool)
        mapped = (size + granule - 1) // granule * granule
        if not self.take(mapped):
            return False
        pool.unmapped.remove(to_map)
        to_map.state = FREE
        if mapped < to_map.size:
            remaining = Block(pool, to_map.ptr + mapped, to_map.size - mapped, UNMAPPED)
            remaining.splice(to_map, to_map.next)
            pool.unmapped.append(remaining)
            to_map.size = mapped
        self.try_merge(to_map, to_map.prev)
        self.try_merge(to_map, to_map.next)
        pool.insert_into_blocks(to_map)
        return True

    def try_allocate_expandable_block(self, pool, size):
        candidate = self.find_expandable_block(pool, size)
        if candidate.state == UNMAPPED and not self.map_block(candidate, min(candidate.size, size)):
            return None
        while candidate.size < size:
            new_candidate = candidate.next
            if not self.map_block(new_candidate, min(size - candidate.size, new_candidate.size)):
                return None
            candidate = new_candidate
        pool.blocks.remove(candidate)
        return candidate

    def unmap_block(self, block):
        pool, granule = block.pool, self.granule(block.pool)
        # Relative to the start of the segment, as handles are.
        base = block
        while base.prev:
            base = base.prev
        begin = -(-(block.ptr - base.ptr) // granule) * granule + base.ptr
        end = (block.ptr + block.size - base.ptr) // granule * granule + base.ptr
        if begin >= end:
            return
        pool.blocks.remove(block)
        if begin > block.ptr:
            before_free = Block(pool, block.ptr, begin - block.ptr)
            before_free.splice(block.prev, block)
            pool.insert_into_blocks(before_free)
        after_size = block.ptr + block.size - end
        if after_size > 0:
            after_free = Block(pool, end, after_size)
            after_free.splice(block, block.next)
            pool.insert_into_blocks(after_free)
        block.ptr, block.size, block.state = begin, end - begin, UNMAPPED
        self.try_merge(block, block.prev)
        self.try_merge(block, block.next)
        pool.unmapped.append(block)
        self.reserved -= end - begin
