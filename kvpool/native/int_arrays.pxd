# The few functions of numpy's C API that tables and slots need: arrays of 32 and 64 bit integers as they lie in memory.
# A module that cimports this calls kvpool_import_arrays() once before anything else.
cdef extern from *:
    """
    #include <numpy/arrayobject.h>

    static int kvpool_import_arrays(void) { return _import_array(); }

    /* Bytes of an item of a one-dimensional, contiguous, aligned array of int32 or int64; 0: it is something else. */
    static inline int kvpool_int_bytes(PyObject *object) {
        PyArrayObject *const array = (PyArrayObject *)object;
        if (!PyArray_CheckExact(object) || PyArray_NDIM(array) != 1 || !PyArray_ISCARRAY_RO(array)) {
            return 0;
        }
        return PyArray_TYPE(array) == NPY_INT32 ? 4 : PyArray_TYPE(array) == NPY_INT64 ? 8 : 0;
    }

    static inline int kvpool_is_writeable(PyObject *array) { return PyArray_ISWRITEABLE((PyArrayObject *)array); }
    static inline void *kvpool_array_data(PyObject *array) { return PyArray_DATA((PyArrayObject *)array); }
    static inline Py_ssize_t kvpool_array_size(PyObject *array) { return (Py_ssize_t)PyArray_SIZE((PyArrayObject *)array); }
    """
    int kvpool_import_arrays() except -1
    # All but the first are for what kvpool_int_bytes() knows.
    int kvpool_int_bytes(object array) noexcept
    bint kvpool_is_writeable(object array) noexcept
    void *kvpool_array_data(object array) noexcept
    Py_ssize_t kvpool_array_size(object array) noexcept
