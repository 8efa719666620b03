"""From a kernel's Python source to object code, by Numba. Imported only where something has to be compiled.

Left alone, Numba optimises every function of a kernel by itself and again inside those that call it, and makes machine
code of each. Here the parts are only put together, and one run of LLVM's passes over the whole kernel gives its object
code. Of the front end the steps that no kernel needs are left out.
"""

import operator
from collections.abc import Callable
from typing import Any, ClassVar

import numba
from llvmlite import ir
from numba import _dynfunc, types
from numba.core import compiler, errors, registry, typed_passes, typeinfer, untyped_passes
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import FunctionPass, PassManager, register_pass
from numba.core.datamodel import models, register_default
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import (
    ConcreteTemplate,
    infer_global,
    make_intrinsic_template,
    signature,
)
from numba.np import arrayobj

from sparkinfer.backend.compiled import DIMENSIONS
from sparkinfer.backend.instructions import Inner, Instruction
from sparkinfer.backend.simd import VEC

_ARGUMENTS = {
    "float64": types.float64,
    "int64": types.int64,
    **{kind: types.Array(types.float64, n, "C") for kind, n in DIMENSIONS.items()},
}
# What code may call that is no part of it: found in every process.
_LIBRARY = frozenset(
    {"syscall", "sched_yield", "memset", "memcpy", "memmove", "exp", "log", "log1p", "sqrt"}
)


# ---- types and instructions ----


class F32x16(types.Type):  # type: ignore[misc]
    """Numba type of a vector of 16 float32 values."""

    def __init__(self) -> None:
        super().__init__(name="f32x16")


_f32x16 = F32x16()
_TYPES = {
    "int64": types.int64,
    "int32": types.int32,
    "float32": types.float32,
    "f32x16": _f32x16,
    "void": types.void,
}


@register_default(F32x16)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, VEC)


def _operator(function: Any, method: str) -> None:
    class Template(ConcreteTemplate):  # type: ignore[misc]
        cases: ClassVar = [signature(_f32x16, _f32x16, _f32x16)]

    infer_global(function)(Template)

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, method)(*args)

    lower_builtin(function, _f32x16, _f32x16)(lower)


for _function, _method in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _operator(_function, _method)


def type_of_instruction(instruction: Instruction) -> Any:
    """Numba's type of the function that an instruction is."""
    n, result = instruction.literals, _TYPES[instruction.result]
    params = [_TYPES[name] for name in instruction.params]
    names = [f"a{place}" for place in range(n + len(params))]

    def typed(context: Any, *given: Any) -> Any:
        literals = [kind.literal_value for kind in given[:n]]

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = instruction.emit(builder, *literals, *args[n:])
            return context.get_dummy_value() if value is None else value

        return result(*given[:n], *params), codegen

    namespace: dict[str, Any] = {"typed": typed}
    arguments = ", ".join(names)
    exec(
        f"def definition(context, {arguments}):\n    return typed(context, {arguments})", namespace
    )
    name = instruction.emit.__name__
    return types.Function(
        make_intrinsic_template(
            instruction, namespace["definition"], name, prefer_literal=n > 0, kwargs={}
        )
    )


def type_of_inner(function: Inner) -> Any:
    """Numba's type of a function that compiled code calls."""
    function.compiler = _part(function.function)  # its type does not keep it
    return types.Dispatcher(function.compiler)


def _part(function: Callable[..., Any]) -> Any:
    decorate = numba.njit(
        pipeline_class=_Pipeline, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True,
        _nrt=False,
    )  # fmt: skip
    return decorate(function)


# ---- the pipeline ----


class _Part(JITCodeLibrary):  # type: ignore[misc]
    """LLVM code of a function and of those that it calls, only to be put into others: neither optimised nor loaded."""

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    @property
    def module(self) -> Any:
        """All of it, as LLVM's module."""
        self._ensure_finalized()
        return self._final_module


class _Inferer(typeinfer.TypeInferer):  # type: ignore[misc]
    """Looks up the same operation on the same types once: that is most of what inference does."""

    known: ClassVar[dict[Any, Any]] = {}

    def resolve_call(self, fnty: Any, pos_args: Any, kw_args: Any) -> Any:
        if kw_args or not isinstance(fnty, types.Function):
            return super().resolve_call(fnty, pos_args, kw_args)
        key = (fnty, tuple(pos_args))
        if key not in self.known:
            self.known[key] = super().resolve_call(fnty, pos_args, kw_args)
        return self.known[key]


@register_pass(mutates_CFG=True, analysis_only=False)
class _Inference(FunctionPass):  # type: ignore[misc]
    """Types of all variables. What kernels compute needs none of Numba's further rules for results."""

    _name = "kernel_inference"

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        context, source = state.typingctx, state.func_ir
        infer = _Inferer(context, source, errors.WarningsFixer(errors.NumbaWarning))  # type: ignore[attr-defined]
        with context.callstack.register(state.targetctx.target, infer, source.func_id, state.args):
            for place, (name, kind) in enumerate(zip(source.arg_names, state.args, strict=True)):
                infer.seed_argument(name, place, kind)
            infer.build_constraint()
            infer.propagate()
            state.typemap, state.return_type, state.calltypes = infer.unify()
        return False


@register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(typed_passes.NativeLowering):  # type: ignore[misc]
    _name = "kernel_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _Part(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        done, library = state["cr"], state.library
        made = done.fndesc
        name = made.qualname.split(".")[-1]
        # No address: Numba only tells functions apart by it.
        found = _dynfunc.make_function(made.lookup_module(), name, "", 0, done.env, (library,))
        state.targetctx.insert_user_function(found, made, [library])
        state["cr"] = done._replace(cfunc=found)
        return True


class _Pipeline(compiler.CompilerBase):  # type: ignore[misc]
    """What kernels need of Numba's front end."""

    def define_pipelines(self) -> list[PassManager]:
        passes = PassManager("kernel")
        for step in (
            untyped_passes.TranslateByteCode,
            untyped_passes.FixupArgs,
            untyped_passes.IRProcessing,
            untyped_passes.DeadBranchPrune,
            untyped_passes.ReconstructSSA,
            _Inference,
            typed_passes.PreLowerStripPhis,
            typed_passes.IRLegalization,
            _Lowering,
            typed_passes.NoPythonBackend,
        ):
            passes.add_pass(step, step.__name__)
        passes.finalize()
        return [passes]


# ---- kernels and routines ----


def object_code(function: Callable[..., None], n_args: int, symbol: str) -> bytes:
    """Object code with one C function `symbol` of `n_args` int64 arguments."""
    return _emitted(_kernel(function, n_args, symbol))


def routine_code(function: Callable[..., Any], kinds: tuple[str, ...], symbol: str) -> bytes:
    """The same of a `Routine`: its C function has the address of all arguments and of the result."""
    return _emitted(_routine(function, kinds, symbol))


def assembly(function: Callable[..., None], n_args: int) -> str:
    """What `object_code` holds, as text."""
    with global_compiler_lock:
        module = _kernel(function, n_args, "kernel")
        return str(_codegen()._tm.emit_assembly(module))


def _codegen() -> Any:
    return registry.cpu_target.target_context.codegen()


def _emitted(module: Any) -> bytes:
    return bytes(_codegen()._tm.emit_object(module))


def _kernel(function: Callable[..., None], n_args: int, symbol: str) -> Any:
    with global_compiler_lock:
        made = _compiled(function, (types.int64,) * n_args)
        module, builder, arguments = _entry(symbol, n_args)
        _call(builder, made.fndesc, arguments)
        builder.ret_void()
        return _whole(symbol, made.library, module)


def _routine(function: Callable[..., Any], kinds: tuple[str, ...], symbol: str) -> Any:
    """`symbol` is given the address of words: of every array its address and its shape, the numbers, the result."""
    word, real = ir.IntType(64), ir.DoubleType()
    with global_compiler_lock:
        made = _compiled(function, tuple(_ARGUMENTS[kind] for kind in kinds))
        module, builder, (start,) = _entry(symbol, 1)
        place = iter(range(1 << 10))

        def following(kind: Any) -> Any:
            address = builder.add(start, ir.Constant(word, 8 * next(place)))
            return builder.inttoptr(address, kind.as_pointer())

        arguments = []
        for kind in kinds:
            if kind not in DIMENSIONS:
                arguments.append(builder.load(following(real if kind == "float64" else word)))
                continue
            data = builder.inttoptr(builder.load(following(word)), real.as_pointer())
            shape = [builder.load(following(word)) for _ in range(DIMENSIONS[kind])]
            arguments.append(_array(builder, _ARGUMENTS[kind], data, shape))
        result = _call(builder, made.fndesc, arguments)
        if made.fndesc.restype == types.float64:
            builder.store(result, following(real))
        builder.ret_void()
        return _whole(symbol, made.library, module)


def _array(builder: Any, kind: Any, data: Any, shape: list[Any]) -> Any:
    """Numba's form of a contiguous array."""
    context = registry.cpu_target.target_context
    array, item = context.make_array(kind)(context, builder), ir.Constant(ir.IntType(64), 8)
    strides = [item]
    for length in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], length))
    arrayobj.populate_array(
        array, data=data, shape=shape, strides=strides, itemsize=item, meminfo=None
    )
    return array._getvalue()


def _compiled(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    part = _part(function)
    part.compile(arguments)
    return part.overloads[arguments]


def _entry(symbol: str, n_args: int) -> tuple[Any, Any, Any]:
    """A module with the beginning of a C function of int64 arguments."""
    module = _codegen()._create_empty_module(symbol)
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * n_args)
    entry = ir.Function(module, kind, symbol)
    return module, ir.IRBuilder(entry.append_basic_block()), entry.args


def _call(builder: Any, made: Any, arguments: Any) -> Any:
    """Call a compiled function. None raises anything; one that did would end the process."""
    context, module = registry.cpu_target.target_context, builder.module
    native = context.declare_function(module, made)
    status, result = context.call_conv.call_function(
        builder, native, made.restype, made.argtypes, arguments
    )
    with builder.if_then(status.is_error):
        trap = module.declare_intrinsic("llvm.trap", (), ir.FunctionType(ir.VoidType(), []))
        builder.call(trap, [])
    return result


def _whole(symbol: str, library: Any, entry: Any) -> Any:
    """All that `symbol` needs in one module, optimised."""
    codegen = _codegen()
    whole = _Part(codegen, symbol)
    whole.add_linking_library(library)
    whole.add_ir_module(entry)
    module = whole.module
    passes, builder = codegen._module_pass_manager()
    passes.run(module, builder)
    # Numba's names are unique in the process that compiles, and a loader takes the first of two equal ones.
    for part in (*module.functions, *module.global_variables):
        if not part.is_declaration and part.name != symbol:
            part.linkage = "internal"
    module.verify()
    outside = {f.name for f in module.functions if f.is_declaration} - _LIBRARY
    strange = sorted(name for name in outside if not name.startswith("llvm."))
    assert not strange, f"{symbol} calls {', '.join(strange)}"
    return module
