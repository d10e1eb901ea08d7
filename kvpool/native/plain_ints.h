/* _plain.h - whether an argument is what it is stored as, so that nothing has to convert it. Runs no Python code. */
#ifndef KVPOOL_PLAIN_H
#define KVPOOL_PLAIN_H

#include <Python.h>
#include <stdint.h>

/* An exact int from 0 to INT32_MAX: what workers have room for, see kvpool/requests/token_ids.py. */
static inline int kvpool_is_token_id(PyObject *number) {
    int overflow;
    long value;
    if (!PyLong_CheckExact(number)) {
        return 0;
    }
    /* One digit is 30 bits at most, and has to be looked at no further. */
#if PY_VERSION_HEX >= 0x030C0000
    if (PyUnstable_Long_IsCompact((const PyLongObject *)number)) {
        return PyUnstable_Long_CompactValue((const PyLongObject *)number) >= 0;
    }
#else
    if (Py_SIZE(number) == 0 || Py_SIZE(number) == 1) {
        return 1;
    }
#endif
    value = PyLong_AsLongAndOverflow(number, &overflow);
    return overflow == 0 && value >= 0 && value <= INT32_MAX;
}

/* An exact str that is ASCII: every message can hold it. */
static inline int kvpool_is_ascii(PyObject *text) {
    return PyUnicode_CheckExact(text) && PyUnicode_IS_COMPACT_ASCII(text);
}

#endif
