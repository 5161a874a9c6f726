/* Door: calls of compiled functions from Python.
 *
 * A compiled function is int64_t f(int64_t *arguments, int64_t *results) and gives 0, or what
 * failed. Its arguments are words of 8 bytes, one after the other: a number is a word, an array its
 * address and the length of each axis, a tuple its items. A *layout* says which: drafters/ahead.py
 * writes it from the function's annotations. slow_door.py is this file in Python, for where no C
 * compiler is. Arrays are borrowed: who calls holds them.
 *
 *   Door(name, fail)             fail(name, code) raises what a code other than 0 stands for
 *   door.load(address, arguments, results)
 *   door(*arguments)             checks types, lets go of the interpreter's lock, calls
 *   door.bound(*first)           the same function with its first arguments written down
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Python's stable ABI (3.11 and newer, with the interpreter's lock) and numpy's arrays (2.0 and
 * newer), as far as they are used: so no headers need to be where this is compiled, and one file
 * serves every version. */

typedef intptr_t Py_ssize_t;
typedef struct _typeobject PyTypeObject;
typedef struct { Py_ssize_t references; PyTypeObject *type; } PyObject;
typedef PyObject *(*PyCFunction)(PyObject *, PyObject *);
typedef struct { const char *name; PyCFunction call; int flags; const char *doc; } PyMethodDef;
typedef struct { int slot; void *pfunc; } PyType_Slot;
typedef struct {
    const char *name;
    int basicsize, itemsize;
    unsigned int flags;
    PyType_Slot *slots;
} PyType_Spec;
typedef struct {
    PyObject base;
    void *init;
    Py_ssize_t index;
    void *copy;
    const char *name, *doc;
    Py_ssize_t size;
    PyMethodDef *methods;
    void *slots, *traverse, *clear, *free;
} PyModuleDef;
typedef int (*visitproc)(PyObject *, void *);

enum { METH_VARARGS = 1 };
enum { Py_tp_call = 50, Py_tp_clear = 51, Py_tp_dealloc = 52, Py_tp_doc = 56, Py_tp_init = 60,
       Py_tp_methods = 64, Py_tp_new = 65, Py_tp_traverse = 71 };
enum { Py_TPFLAGS_DEFAULT = 1 << 18, Py_TPFLAGS_HAVE_GC = 1 << 14, Py_TPFLAGS_BASETYPE = 1 << 10 };

#define API extern __attribute__((visibility("default")))
API PyObject *PyExc_TypeError, *PyExc_SystemError, *PyExc_RuntimeError, *PyExc_ValueError;
API PyObject _Py_NoneStruct;
API PyTypeObject PyTuple_Type;
API void Py_IncRef(PyObject *), Py_DecRef(PyObject *);
API PyObject *PyErr_Occurred(void), *PyErr_NoMemory(void), *PyErr_Format(PyObject *, const char *, ...);
API void PyErr_SetString(PyObject *, const char *);
API void PyErr_Fetch(PyObject **, PyObject **, PyObject **);
API long long PyLong_AsLongLong(PyObject *);
API PyObject *PyLong_FromLongLong(long long), *PyFloat_FromDouble(double), *PyBool_FromLong(long);
API double PyFloat_AsDouble(PyObject *);
API int PyObject_IsTrue(PyObject *), PyType_IsSubtype(PyTypeObject *, PyTypeObject *);
API PyObject *PyTuple_New(Py_ssize_t), *PyTuple_GetItem(PyObject *, Py_ssize_t);
API Py_ssize_t PyTuple_Size(PyObject *), PyDict_Size(PyObject *), PyBytes_Size(PyObject *);
API int PyTuple_SetItem(PyObject *, Py_ssize_t, PyObject *);
API char *PyBytes_AsString(PyObject *);
API int PyArg_ParseTuple(PyObject *, const char *, ...);
API PyObject *PyObject_CallFunction(PyObject *, const char *, ...), *Py_BuildValue(const char *, ...);
API PyObject *PyImport_ImportModule(const char *), *PyObject_GetAttrString(PyObject *, const char *);
API void *PyMem_Malloc(size_t), *PyMem_Calloc(size_t, size_t);
API void PyMem_Free(void *), PyObject_GC_UnTrack(void *);
API void *PyEval_SaveThread(void);
API void PyEval_RestoreThread(void *);
API PyObject *PyType_FromSpec(PyType_Spec *), *PyType_GenericNew(PyTypeObject *, PyObject *, PyObject *);
API PyObject *PyType_GenericAlloc(PyTypeObject *, Py_ssize_t);
API void *PyType_GetSlot(PyTypeObject *, int);
API PyObject *PyModule_Create2(PyModuleDef *, int);
API int PyModule_AddObjectRef(PyObject *, const char *, PyObject *);

enum { Py_tp_free = 74 };

typedef struct {
    PyObject base;
    PyTypeObject *scalar;
    char kind, letter, order, old_flags;
    int number;
    uint64_t flags;
    Py_ssize_t size;
} Dtype;

typedef struct {
    PyObject base;
    char *data;
    int axes;
    Py_ssize_t *lengths, *strides;
    PyObject *owner;
    Dtype *dtype;
    int flags; /* bit 0: C order */
} Array;

static PyTypeObject *array_type, *bound_type;

#define NONE (&_Py_NoneStruct)

static void clear(PyObject **place)
{
    PyObject *before = *place;
    *place = NULL;
    if (before != NULL) Py_DecRef(before);
}

static int is_of(PyObject *value, PyTypeObject *type)
{
    return value->type == type || PyType_IsSubtype(value->type, type);
}

typedef int64_t (*compiled)(int64_t *, int64_t *);

/* Layouts: 'i' int, 'f' float, 'b' bool, 'A' kind itemsize axes, '(' items; all are bytes. */

typedef struct {
    PyObject base;
    PyObject *name, *fail, *load;
    compiled call;
    PyObject *arguments, *results; /* bytes */
    Py_ssize_t words, result_words;
} Door;

typedef struct {
    PyObject base;
    Door *door;
    PyObject *held; /* the bound arguments, and of what this is bound */
    int64_t *words;
    Py_ssize_t num_args, num_words, layout_at; /* bound so far */
    int busy;
} Bound;

static const char *skip(const char *at, Py_ssize_t *words)
{
    switch (*at) {
    case 'A':
        *words += 1 + at[3];
        return at + 4;
    case '(': {
        int num = (unsigned char)at[1];
        at += 2;
        while (num-- > 0) at = skip(at, words);
        return at;
    }
    default:
        *words += 1;
        return at + 1;
    }
}

static const char *write_value(const char *at, PyObject *value, int64_t **out)
{
    switch (*at) {
    case 'i': {
        int64_t number = PyLong_AsLongLong(value);
        if (number == -1 && PyErr_Occurred()) return NULL;
        *(*out)++ = number;
        return at + 1;
    }
    case 'f': {
        double number = PyFloat_AsDouble(value);
        if (number == -1.0 && PyErr_Occurred()) return NULL;
        memcpy((*out)++, &number, 8);
        return at + 1;
    }
    case 'b': {
        int truth = PyObject_IsTrue(value);
        if (truth < 0) return NULL;
        *(*out)++ = truth;
        return at + 1;
    }
    case 'A': {
        Array *array = (Array *)value;
        int axes = at[3];
        if (!is_of(value, array_type)) {
            PyErr_Format(PyExc_TypeError, "an array is wanted, not %R", value->type);
            return NULL;
        }
        if (array->axes != axes || array->dtype->kind != at[1] || array->dtype->size != at[2] ||
            (array->flags & 1) == 0) {
            PyErr_Format(PyExc_TypeError,
                         "an array of %d axes, kind %c of %d bytes, in C order is wanted, "
                         "not one of %d axes of %R%s",
                         axes, at[1], at[2], array->axes, array->dtype,
                         array->flags & 1 ? "" : " in another order");
            return NULL;
        }
        *(*out)++ = (int64_t)(intptr_t)array->data;
        for (int i = 0; i < axes; i++) *(*out)++ = array->lengths[i];
        return at + 4;
    }
    case '(': {
        int num = (unsigned char)at[1];
        if (!is_of(value, &PyTuple_Type) || PyTuple_Size(value) != num) {
            PyErr_Format(PyExc_TypeError, "a tuple of %d is wanted, not %R", num, value->type);
            return NULL;
        }
        at += 2;
        for (int i = 0; i < num; i++) {
            at = write_value(at, PyTuple_GetItem(value, i), out);
            if (at == NULL) return NULL;
        }
        return at;
    }
    }
    PyErr_SetString(PyExc_SystemError, "a layout of another version");
    return NULL;
}

static PyObject *read_value(const char **at, const int64_t **in)
{
    switch (*(*at)++) {
    case 'i':
        return PyLong_FromLongLong(*(*in)++);
    case 'f': {
        double number;
        memcpy(&number, (*in)++, 8);
        return PyFloat_FromDouble(number);
    }
    case 'b':
        return PyBool_FromLong(*(*in)++ != 0);
    case '(': {
        int num = (unsigned char)*(*at)++;
        PyObject *items = PyTuple_New(num);
        for (int i = 0; items != NULL && i < num; i++) {
            PyObject *item = read_value(at, in);
            if (item == NULL) {
                clear(&items);
            } else {
                PyTuple_SetItem(items, i, item);
            }
        }
        return items;
    }
    }
    PyErr_SetString(PyExc_SystemError, "a result of another version");
    return NULL;
}

/* Write arguments first .. of a call behind those that are bound. */
static int write_all(Door *door, PyObject *args, Py_ssize_t bound, Py_ssize_t *layout_at,
                     int64_t **out)
{
    const char *layout = PyBytes_AsString(door->arguments);
    const char *at = layout + *layout_at;
    for (Py_ssize_t i = 0; i < PyTuple_Size(args); i++) {
        if (at == layout + PyBytes_Size(door->arguments)) {
            PyErr_Format(PyExc_TypeError, "%U takes %zd arguments", door->name, bound + i);
            return -1;
        }
        at = write_value(at, PyTuple_GetItem(args, i), out);
        if (at == NULL) {
            PyObject *type, *value, *trace;
            PyErr_Fetch(&type, &value, &trace);
            PyErr_Format(type, "%U, argument %zd: %S", door->name, bound + i + 1,
                         value == NULL ? NONE : value);
            clear(&type);
            clear(&value);
            clear(&trace);
            return -1;
        }
    }
    *layout_at = at - layout;
    return 0;
}

static PyObject *finish(Door *door, Py_ssize_t layout_at, int64_t *words)
{
    int64_t results[32] = {0}, failed;
    if (layout_at != PyBytes_Size(door->arguments)) {
        return PyErr_Format(PyExc_TypeError, "%U takes more arguments", door->name);
    }
    void *thread = PyEval_SaveThread();
    failed = door->call(words, results);
    PyEval_RestoreThread(thread);
    if (failed != 0) {
        PyObject *told = PyObject_CallFunction(door->fail, "OL", door->name, (long long)failed);
        if (told != NULL) {
            Py_DecRef(told);
            PyErr_Format(PyExc_RuntimeError, "%U failed", door->name);
        }
        return NULL;
    }
    if (door->result_words == 0) {
        Py_IncRef(NONE);
        return NONE;
    }
    const char *at = PyBytes_AsString(door->results);
    const int64_t *in = results;
    return read_value(&at, &in);
}

static int ready(Door *door)
{
    if (door->call != NULL) return 0;
    PyObject *done = PyObject_CallFunction(door->load, "(O)", door);
    if (done == NULL) return -1;
    Py_DecRef(done);
    if (door->call == NULL) {
        PyErr_Format(PyExc_RuntimeError, "%U was not loaded", door->name);
        return -1;
    }
    return 0;
}

static int no_names(PyObject *kwargs)
{
    if (kwargs == NULL || PyDict_Size(kwargs) == 0) return 0;
    PyErr_SetString(PyExc_TypeError, "a compiled function takes no names of arguments");
    return -1;
}

#define FEW 96

static PyObject *door_call(Door *door, PyObject *args, PyObject *kwargs)
{
    if (ready(door) < 0 || no_names(kwargs) < 0) return NULL;
    int64_t few[FEW], *words = few, *out;
    if (door->words > FEW) {
        words = PyMem_Malloc(8 * (size_t)door->words);
        if (words == NULL) return PyErr_NoMemory();
    }
    PyObject *result = NULL;
    Py_ssize_t layout_at = 0;
    out = words;
    if (write_all(door, args, 0, &layout_at, &out) == 0) result = finish(door, layout_at, words);
    if (words != few) PyMem_Free(words);
    return result;
}

static PyObject *bind(Door *door, Bound *before, PyObject *args)
{
    Bound *bound = (Bound *)PyType_GenericAlloc(bound_type, 0);
    if (bound == NULL) return NULL;
    Py_IncRef((PyObject *)door);
    bound->door = door;
    bound->held = Py_BuildValue("(OO)", args, before == NULL ? NONE : (PyObject *)before);
    bound->words = PyMem_Calloc((size_t)door->words + 1, 8);
    bound->num_args = PyTuple_Size(args);
    bound->num_words = bound->layout_at = 0;
    bound->busy = 0;
    if (bound->held == NULL || bound->words == NULL) {
        Py_DecRef((PyObject *)bound);
        return PyErr_NoMemory();
    }
    if (before != NULL) {
        memcpy(bound->words, before->words, 8 * (size_t)before->num_words);
        bound->num_args += before->num_args;
        bound->num_words = before->num_words;
        bound->layout_at = before->layout_at;
    }
    int64_t *out = bound->words + bound->num_words;
    if (write_all(door, args, before == NULL ? 0 : before->num_args, &bound->layout_at, &out) < 0) {
        Py_DecRef((PyObject *)bound);
        return NULL;
    }
    bound->num_words = out - bound->words;
    return (PyObject *)bound;
}

static PyObject *door_bound(Door *door, PyObject *args)
{
    if (ready(door) < 0) return NULL;
    return bind(door, NULL, args);
}

static void keep(PyObject **place, PyObject *value)
{
    Py_IncRef(value);
    clear(place);
    *place = value;
}

static PyObject *door_load(Door *door, PyObject *args)
{
    long long address;
    PyObject *arguments, *results;
    if (!PyArg_ParseTuple(args, "LSS", &address, &arguments, &results)) return NULL;
    keep(&door->arguments, arguments);
    keep(&door->results, results);
    door->words = door->result_words = 0;
    const char *at = PyBytes_AsString(arguments), *end = at + PyBytes_Size(arguments);
    while (at < end) at = skip(at, &door->words);
    if (PyBytes_Size(results) > 0) {
        skip(PyBytes_AsString(results), &door->result_words);
    }
    if (door->result_words > 32) {
        PyErr_SetString(PyExc_ValueError, "too many results");
        return NULL;
    }
    door->call = (compiled)(intptr_t)address;
    Py_IncRef(NONE);
    return NONE;
}

static int door_init(Door *door, PyObject *args, PyObject *kwargs)
{
    PyObject *name, *load, *fail;
    if (no_names(kwargs) < 0 || !PyArg_ParseTuple(args, "UOO", &name, &load, &fail)) return -1;
    keep(&door->name, name);
    keep(&door->load, load);
    keep(&door->fail, fail);
    return 0;
}

static int door_traverse(Door *door, visitproc visit, void *arg)
{
    int told = visit((PyObject *)door->base.type, arg);
    if (told == 0 && door->load != NULL) told = visit(door->load, arg);
    if (told == 0 && door->fail != NULL) told = visit(door->fail, arg);
    return told;
}

static int door_clear(Door *door)
{
    clear(&door->load);
    clear(&door->fail);
    return 0;
}

static void door_dealloc(Door *door)
{
    PyTypeObject *type = door->base.type;
    PyObject_GC_UnTrack(door);
    clear(&door->name);
    clear(&door->arguments);
    clear(&door->results);
    door_clear(door);
    ((void (*)(void *))PyType_GetSlot(type, Py_tp_free))(door);
    Py_DecRef((PyObject *)type);
}

static PyMethodDef door_methods[] = {
    {"load", (PyCFunction)door_load, METH_VARARGS, "load(address, arguments, results): layouts"},
    {"bound", (PyCFunction)door_bound, METH_VARARGS, "bound(*first): with its first arguments"},
    {NULL},
};

static PyType_Slot door_slots[] = {
    {Py_tp_doc, "Door(name, load, fail): load(door) is called before the first call"},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, door_init},
    {Py_tp_traverse, door_traverse},
    {Py_tp_clear, door_clear},
    {Py_tp_dealloc, door_dealloc},
    {Py_tp_call, door_call},
    {Py_tp_methods, door_methods},
    {0, NULL},
};

static PyType_Spec door_spec = {
    "drafters.door.Door", sizeof(Door), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, door_slots,
};

static PyObject *bound_call(Bound *bound, PyObject *args, PyObject *kwargs)
{
    if (no_names(kwargs) < 0) return NULL;
    if (bound->busy) {
        return PyErr_Format(PyExc_RuntimeError, "%U runs with these arguments already",
                            bound->door->name);
    }
    Py_ssize_t layout_at = bound->layout_at;
    int64_t *out = bound->words + bound->num_words;
    if (write_all(bound->door, args, bound->num_args, &layout_at, &out) < 0) return NULL;
    bound->busy = 1;
    PyObject *result = finish(bound->door, layout_at, bound->words);
    bound->busy = 0;
    return result;
}

static PyObject *bound_bound(Bound *bound, PyObject *args)
{
    return bind(bound->door, bound, args);
}

static void bound_dealloc(Bound *bound)
{
    PyTypeObject *type = bound->base.type;
    PyMem_Free(bound->words);
    clear(&bound->held);
    clear((PyObject **)&bound->door);
    ((void (*)(void *))PyType_GetSlot(type, Py_tp_free))(bound);
    Py_DecRef((PyObject *)type);
}

static PyMethodDef bound_methods[] = {
    {"bound", (PyCFunction)bound_bound, METH_VARARGS, "bound(*following): with more arguments"},
    {NULL},
};

static PyType_Slot bound_slots[] = {
    {Py_tp_doc, "A compiled function and its first arguments; one call at a time"},
    {Py_tp_dealloc, bound_dealloc},
    {Py_tp_call, bound_call},
    {Py_tp_methods, bound_methods},
    {0, NULL},
};

static PyType_Spec bound_spec = {
    "drafters.door.Bound", sizeof(Bound), 0, Py_TPFLAGS_DEFAULT, bound_slots,
};

static PyModuleDef door_module = {
    .base = {1, NULL}, .name = "door", .doc = "Calls of compiled functions from Python.", .size = -1,
};

API PyObject *PyInit_door(void)
{
    PyObject *numpy = PyImport_ImportModule("numpy");
    if (numpy == NULL) return NULL;
    array_type = (PyTypeObject *)PyObject_GetAttrString(numpy, "ndarray");
    Py_DecRef(numpy);
    bound_type = (PyTypeObject *)PyType_FromSpec(&bound_spec);
    PyObject *door_type = PyType_FromSpec(&door_spec);
    PyObject *module = PyModule_Create2(&door_module, 3); /* of the stable ABI */
    if (array_type == NULL || bound_type == NULL || door_type == NULL || module == NULL ||
        PyModule_AddObjectRef(module, "Door", door_type) < 0) {
        return NULL;
    }
    return module;
}
