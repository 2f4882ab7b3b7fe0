"""List of what the package replaces in other libraries and in Python, why, and until when.

``tests/test_architecture.py`` compares the files in this list with the code.

adapters/keras/optimizer.py
    ``add_variable_from_reference`` of a Keras optimizer, to learn to which parameter each variable belongs. Until the
    optimizer is built.
adapters/lightning/steps.py
    ``log`` and ``log_dict`` of a LightningModule, to collect metrics. During a call of ``training_step`` or similar.
checkpoint/weights/deferred/tensors.py
    The class of parameters and buffers of a model built under ``deferred``, to refuse reads of values that they do not
    have yet. Until ``materialize()``.
cli/foreign/run_module.py
    ``sys.path`` and ``sys.argv``, as ``python -m`` sets them. For the process, which runs nothing else.
comm/desync/patch.py
    Collective functions of ``torch.distributed``, also where the script has imported them, to name the first call in
    which workers differ. Until ``stop()``: when the world is closed, or Python exits.
comm/mpi/library.py
    ``mpi4py.rc``, because mpi4py would initialize MPI when imported and finalize it at exit. For the process.
data/objects/forward_values.py
    Attributes of modules' classes, to warn if the loop reads what the forward pass of one worker has set. Until
    ``end()``.
evaluation/metrics.py
    ``distributed_available_fn`` of torchmetrics' metrics, which would add up states that each worker has in full. While
    a metric is computed.
launchers/call_worker.py
    ``sys.path``, which becomes that of the caller. For the process.
launchers/local/become.py
    ``__main__``, ``sys.argv``, ``sys.path``, the key of ``multiprocessing``, the folder of ``tempfile`` and the start
    time of ``logging``, because a forked worker is to see a new Python. For the process. ``sys.excepthook``: until its
    first call.
partition/watch.py
    The call of each layer, and ``apply`` of ``torch.autograd.Function``, to record or replay a forward pass. During it.
step/forward.py
    ``forward`` of the modules whose activations are recomputed. As long as the model exists.
step/numerics.py
    Settings of ``torch.backends``, which choose deterministic kernels. For the process.
step/optimizers/several.py
    ``step`` of a copied optimizer, as a schedule has replaced that of the original. As long as the copy exists.
strategies/pipeline/release.py
    The class of parameters of other stages, to refuse reads of values that this worker lacks. Until ``allocate()``.
system/excepthook.py
    ``sys.excepthook``, to report failures, and in it ``sys.stderr``, which torch has replaced. For the process.
system/torch_internals.py
    The back end ``mpi`` of torch, which few builds of torch have, for ``comm/mpi/backend.py``: for the process. The
    count of process groups, which a failed join does not reset: torch continues counting.
testing/forks.py
    ``sys.stdout`` and ``sys.stderr``, which a test runner has replaced. For a forked process.
testing/worker_main.py
    ``sys.path`` and ``sys.modules``, to import the module of a test. For the process.
"""
