"""What PyTorch 2.13 and NCCL say, as it was recorded, by the name of the row that explains it; and what others say."""

GLOO = "/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp"
NCCL = "DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94,"
SYSTEM = (
    f"{NCCL} unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \n"
    "Last error:\n"
)
USAGE = (
    f"{NCCL} invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.21.5\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
)
REMOTE = (
    f"{NCCL} remote process exited or there was a network error, NCCL version 2.21.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
    "Last error:\n"
)
CUDA = (
    f"{NCCL} unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.26.2\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)

KNOWN = {
    "Backward on a report": ["AttributeError: 'float' object has no attribute 'backward'"],
    "Input in a worker": ["EOFError: EOF when reading a line", "bdb.BdbQuit", "BdbQuit: "],
    "Duplicate GPU detected": [f"{USAGE}Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 2000"],
    "Invalid device ordinal": [
        "AcceleratorError: CUDA error: invalid device ordinal\n"
        "GPU device may be out of range, do you have enough GPUs?\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
        "incorrect.",
        "RuntimeError: No CUDA GPUs are available",
        "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
    ],
    "PyTorch without CUDA": [
        "AssertionError: Torch not compiled with CUDA enabled",
        "RuntimeError: Distributed package doesn't have NCCL built in",
    ],
    "CUDA driver too old": [
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
        "driver by downloading and installing a new version",
        f"{CUDA}Cuda failure 'CUDA driver version is insufficient for CUDA runtime version'",
    ],
    "NCCL version mismatch": [
        f"{USAGE}Mismatched NCCL version detected : rank 1 version 22705 rank 0 version 22703",
        f"{NCCL} internal error\nLast error:\nMessage truncated : received 1024 bytes instead of 256",
    ],
    "CUDA out of memory": [
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.72 GiB "
        "of which 12.00 MiB is free.",
        f"{CUDA}Cuda failure 2 'out of memory'",
        f"{CUDA}Failed to CUDA calloc async 4 bytes",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
    "Out of shared memory": [
        "RuntimeError: DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory. Please try to raise your shared memory limit.",
        "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
        "last):\nRuntimeError: unable to allocate shared memory(shm) for file </torch_9759_2403084691_0>: No space "
        "left on device (28)\n",
        f"{SYSTEM}Error while creating shared memory segment /dev/shm/nccl-cjY8K5 (size 10617216), error: No space "
        "left on device (28)",
        "node:168:168 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-UbzKZ9 to 9637892 bytes",
        "OSError: [Errno 28] No space left on device: '/dev/shm/x'",
        "was killed by signal 7 (SIGBUS)",
    ],
    "No space left on device": [
        "OSError: [Errno 28] No space left on device: '/data/step-000100/rank-0.pt'",
        "OSError: [Errno 122] Disk quota exceeded",
    ],
    "Too many open files": [
        f"RuntimeError: [enforce fail at {GLOO}/socket.cc:24] rv != -1. -1 vs -1. socket: Too many open files",
        "RuntimeError: Too many open files. Communication with the workers is no longer possible. Please increase the "
        "limit using `ulimit -n` in the shell or change the sharing strategy",
        "OSError: [Errno 24] Too many open files: 'image-7.png'",
    ],
    "Locked memory": [
        f"{SYSTEM}Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
        f"{SYSTEM}Call to ibv_create_qp failed",
    ],
    "Out of memory": [
        "MemoryError: ",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 140737488355328 bytes. Error code 12 (Cannot allocate memory)",
    ],
    "Address already in use": [
        "DistNetworkError: The server socket has failed to listen on any local network address. port: 44141, useIpv6: "
        "false, code: -98, name: EADDRINUSE, message: address already in use",
        "OSError: [Errno 98] Address already in use",
    ],
    "Unable to find address for an interface": [
        f"RuntimeError: [enforce fail at {GLOO}/device.cc:84] ifa != nullptr. Unable to find address for: eth7",
        f"{NCCL} internal error\nLast error:\nBootstrap : no socket interface found",
    ],
    "A machine gives its loopback address": [
        f"RuntimeError: Gloo connectFullMesh failed with [{GLOO}/pair.cc:152] timed out connecting: SO_ERROR: "
        "Connection refused, remote=[127.0.0.1]:18851$0",
        "WorkerLost: Rank 0: could not reach the others: Gloo connectFullMesh failed with "
        f"[{GLOO}/pair.cc:152] timed out connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:27536$0.",
    ],
    "Name or service not known": [
        "[c10d] The IPv6 network addresses of (no-such-host.invalid, 42151) cannot be retrieved (gai error: -2 - Name "
        "or service not known).",
        "StartError: Worker 1 could not reach the launcher at node-b:29500: [Errno -2] Name or service not known.",
    ],
    "No route to host": [
        "DistNetworkError: The client socket has failed to connect to any network address of (10.8.0.9, 29500). The "
        "client socket has failed to connect to 2.86.0.0:10946 (errno: 113 - No route to host).",
        "DistNetworkError: The client socket has failed to connect to any network address of (10.9.0.9, 29500). The "
        "client socket has failed to connect to 209.85.0.0:40750 (errno: 101 - Network is unreachable).",
        f"{SYSTEM}socketStartConnect: Connect to 192.168.19.14<52822> failed : No route to host",
    ],
    "Mismatch of collectives": [
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        f"  what():  [enforce fail at {GLOO}/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4. Received data size "
        "doesn't match expected size. Is there a distributed collective mismatch in your code?",
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=0, OpType=BROADCAST, TensorShape=[4]), but Rank 1 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=0, OpType=ALLREDUCE, TensorShape=[4]).",
        "RuntimeError: [1]: params[0] in this process with sizes [5, 4] appears not to match sizes of the same param "
        "in process 0.",
        "NET/IB : req 0/1 tag 0 peer 10.10.23.6<58683> collective mismatch error, local size 496640 remote size 65536",
    ],
    "Collective timed out": [
        "[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) "
        "ran for 600060 milliseconds before timing out.",
        f"RuntimeError: [{GLOO}/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete",
        f"RuntimeError: [{GLOO}/unbound_buffer.cc:129] Timed out waiting 5000ms for send operation to complete",
        "RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 1800000 ms\n Original exception: \n"
        f"[{GLOO}/pair.cc:553] Connection closed by peer [127.0.0.1]:44420.",
    ],
    "Not all workers came": [
        "DistStoreError: Timed out after 4 seconds waiting for clients. 1/2 clients joined.",
        "DistStoreError: wait timeout after 3000ms, keys: /0//cpu//0/1",
    ],
    "Connection timed out": [
        "DistNetworkError: The client socket has timed out after 3000ms while trying to connect to (127.0.0.1, 46609).",
        f"RuntimeError: Gloo connectFullMesh failed with [{GLOO}/pair.h:311] Connect timeout [none]",
        "StartError: Rank 1 could not reach rank 0 at 10.0.0.1:29500 in 600 s: The client socket has timed out after "
        "600000ms while trying to connect to (10.0.0.1, 29500).",
        f"{SYSTEM}socketStartConnect: Connect to 10.0.0.1<40221> failed : Connection timed out",
    ],
    "Connection refused": [
        f"{SYSTEM}socketStartConnect: Connect to 10.38.10.112<21724> failed : Connection refused",
        f"RuntimeError: Gloo connectFullMesh failed with [{GLOO}/pair.cc:152] timed out connecting: SO_ERROR: "
        "Connection refused, remote=[10.0.0.2]:18851$0",
        "StartError: Worker 1 could not reach the launcher at 10.0.0.1:29500: [Errno 111] Connection refused.",
    ],
    "Connection reset or closed by peer": [
        f"RuntimeError: [{GLOO}/pair.cc:537] Read error [127.0.0.1]:44710: Connection reset by peer. This is typically "
        "caused by a remote worker hanging or bugs in the application. Check the logs of the remote worker before "
        "reporting an error.",
        f"RuntimeError: [{GLOO}/pair.cc:553] Connection closed by peer [127.0.0.1]:17299. This is typically caused by "
        "a remote worker crashing. Check the logs of the remote worker before reporting an error.",
        "DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown "
        "or crash?",
        f"{REMOTE}socketProgressOpt: Call to recv from 172.16.0.4<33759> failed : Connection reset by peer",
        f"{REMOTE}NET/IB : Got completion from peer 172.21.17.89<38536> with error 5, opcode 48, len 32710",
    ],
    "Unhandled CUDA error": [f"{CUDA}Cuda failure 999 'unknown error'"],
    "Unhandled system error": [
        SYSTEM,
        "NCCL error in: /pytorch/torch/lib/c10d/ProcessGroupNCCL.cpp:410, unhandled system error, NCCL version 2.4.8",
    ],
}

OTHERS = [
    "ValueError: bad batch",
    "ConnectionRefusedError: [Errno 111] Connection refused",
    "ConnectionError: HTTPConnectionPool(host='mlflow', port=5000): Max retries exceeded with url: /api (Caused by "
    "NewConnectionError('Failed to establish a new connection: [Errno 111] Connection refused'))",
    "URLError: <urlopen error [Errno -2] Name or service not known>",
    "gaierror: [Errno -3] Temporary failure in name resolution",
    "TimeoutError: [Errno 110] Connection timed out",
    "TimeoutError: The read operation timed out",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "redis.exceptions.ConnectionError: Error 113 connecting to 10.0.0.4:6379. No route to host.",
    "OperationalError: could not connect to server: Connection refused. Is the server running on host 'db'?",
    "ReadTimeout: HTTPSConnectionPool(host='huggingface.co', port=443): Read timed out. (read timeout=10)",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (16x12 and 33x131)",
    "RuntimeError: The size of tensor a (4) must match the size of tensor b (5) at non-singleton dimension 1",
    "RuntimeError: Error(s) in loading state_dict for Net: size mismatch for a.weight: copying a param with shape [4]",
    "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "RuntimeError: CUDA error: device-side assert triggered",
    "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation",
    "IndexError: index 7 is out of bounds for dimension 0 with size 4",
    "FileNotFoundError: [Errno 2] No such file or directory: 'train.csv'",
    "PermissionError: [Errno 13] Permission denied: '/data/out'",
    "ModuleNotFoundError: No module named 'timm'",
    "ImportError: libGL.so.1: cannot open shared object file: No such file or directory",
    "KeyError: 'image 7'",
    "AssertionError: watchdog of the simulation barked",
    "RecursionError: maximum recursion depth exceeded",
    "UnicodeDecodeError: 'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte",
    "RuntimeError: DataLoader worker (pid 7) exited unexpectedly",
    "NonFiniteLoss: The loss is nan at step 2, microbatches 4 to 7, computed by rank 1. No update was made.",
    "StartError: Rank 0 waited 600 s at 127.0.0.1:29500, but rank 3 of 4 workers did not arrive. See their logs; were "
    "all of them started with this address?",
    "DisagreementError: The workers do not agree on data length: rank 0: 1000, rank 1: 900.",
    "WorkerLost: Rank 0 lost rank 1: its process 4242 ended. See the output of rank 1 for the cause.",
    "WorkerSilent: Rank 0 waited 600 s for rank 1 (timeout_seconds). See the output of rank 1: it is stopped.",
    "ConfigError: there is no setting 'batchsize'. Did you mean 'batch'?",
    "was killed by signal 9 (SIGKILL)",
    "was killed by signal 11 (SIGSEGV)",
    "ended with exit code 3",
]
