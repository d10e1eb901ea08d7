# The few functions of numpy's C API that id arrays need. Cython's own numpy.pxd would import numpy with the module,
# which takes longer than all of kvpool; here it is imported when the first id array is asked for.
from libc.stdint cimport int32_t

cdef extern from *:
    """
    #include <numpy/arrayobject.h>

    static int kvpool_import_numpy(void) { return _import_array(); }

    static PyObject *kvpool_new_ids(Py_ssize_t n) {
        npy_intp shape = (npy_intp)n;
        return PyArray_SimpleNew(1, &shape, NPY_INT32);
    }

    /* An array that can be read as it lies in memory: one-dimensional, contiguous, aligned int32 of this machine. */
    static int kvpool_is_plain_ids(PyObject *array) {
        return PyArray_CheckExact(array) && PyArray_TYPE((PyArrayObject *)array) == NPY_INT32 &&
               PyArray_NDIM((PyArrayObject *)array) == 1 && PyArray_ISCARRAY_RO((PyArrayObject *)array);
    }

    static int32_t *kvpool_ids_data(PyObject *array) { return (int32_t *)PyArray_DATA((PyArrayObject *)array); }
    static Py_ssize_t kvpool_ids_size(PyObject *array) { return (Py_ssize_t)PyArray_SIZE((PyArrayObject *)array); }
    """
    int kvpool_import_numpy() except -1
    object kvpool_new_ids(Py_ssize_t n)
    bint kvpool_is_plain_ids(object array) noexcept
    int32_t *kvpool_ids_data(object array) noexcept
    Py_ssize_t kvpool_ids_size(object array) noexcept
