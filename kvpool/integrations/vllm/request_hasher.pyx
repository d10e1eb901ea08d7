"""What vLLM's ``get_request_block_hasher`` returns, native for blocks without extra keys."""
from cpython.bytes cimport PyBytes_CheckExact
from cpython.list cimport PyList_CheckExact, PyList_GET_SIZE, PyList_GetSlice

from kvpool.native.block_hasher cimport BlockHasherCore

__all__ = ["RequestHasher"]


cdef class Prefix:
    """A request that ends earlier: all its attributes, but fewer tokens."""
    cdef object request
    cdef readonly Py_ssize_t num_tokens

    def __init__(self, request, num_tokens):
        self.request = request
        self.num_tokens = num_tokens

    def __getattr__(self, name):
        return getattr(self.request, name)


cdef class RequestHasher(BlockHasherCore):
    """RequestHasher(block_size, algorithm, digest, hash_function, stock, request_class, names)\n--\n\n\
    Called with a request, it returns the hashes of the full blocks that have none yet. O(new tokens).

    Blocks that may have extra keys (LoRA, multimodal inputs, the salt, prompt embeddings), and requests of another class
    than vLLM's, are hashed by vLLM's own hasher; tokens that are no plain ints by its hash function.

    Args:
        block_size, algorithm, digest: of the hashes.
        hash_function: vLLM's, of which ``algorithm`` is the description.
        stock: vLLM's request block hasher for them.
        request_class: the only class whose attributes are known here.
        names: vLLM's module that holds NONE_HASH, which is set when an engine starts.
    """
    cdef object hash_function
    cdef object stock
    cdef object request_class
    cdef object names

    def __init__(self, block_size, algorithm, digest, hash_function, stock, request_class, names):
        self._create(block_size, algorithm, digest)
        self.hash_function = hash_function
        self.stock = stock
        self.request_class = request_class
        self.names = names

    def __call__(self, request):
        cdef Py_ssize_t first, past, num_keyed
        if type(request) is not self.request_class:
            return self.stock(request)
        hashes, tokens = request.block_hashes, request._all_token_ids
        if not PyList_CheckExact(hashes) or not PyList_CheckExact(tokens):
            return self.stock(request)
        first, past = PyList_GET_SIZE(hashes), PyList_GET_SIZE(tokens) // self.block_size
        if first >= past:
            return []
        num_keyed = self.num_keyed_blocks(request, first, past)
        if num_keyed >= past or num_keyed < first:
            return self.stock(request)
        return self.hash_rest(request, hashes, tokens, num_keyed, past)

    cdef Py_ssize_t num_keyed_blocks(self, object request, Py_ssize_t first, Py_ssize_t past) except -1:
        """Leading blocks that have a hash or may have extra keys: first .. past. O(1)."""
        cdef Py_ssize_t end = 0
        if request.lora_request or request.prompt_embeds is not None:
            return past
        features = request.mm_features
        if features:
            place = features[len(features) - 1].mm_position  # the last one: they are sorted
            end = place.offset + place.length
        elif not request.cache_salt:
            return first
        if request.cache_salt:
            end = max(end, 1)
        return min(max(first, (end + self.block_size - 1) // self.block_size), past)

    cdef list hash_rest(self, object request, list hashes, list tokens, Py_ssize_t num_keyed, Py_ssize_t past):
        """Blocks up to ``num_keyed`` by vLLM's hasher, the plain ones behind them natively."""
        cdef Py_ssize_t first = PyList_GET_SIZE(hashes), size = self.block_size
        cdef list new = self.stock(Prefix(request, num_keyed * size)) if num_keyed > first else []
        cdef object parent = new[len(new) - 1] if new else hashes[first - 1] if first > 0 else None
        if not parent:
            parent = self.names.NONE_HASH
        if not PyBytes_CheckExact(parent):
            return self.stock(request)
        self._hash_plain_blocks(parent, PyList_GetSlice(tokens, num_keyed * size, past * size), 0, new)
        return new

    def _hash_exactly(self, parent, tokens):
        """The hash of a block whose tokens are not all plain ints, or too many for the native form."""
        return self.hash_function((parent, tuple(tokens), None))

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError("a request block hasher can't be pickled, as vLLM's can't")
