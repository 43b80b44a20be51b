// In place of CUDA's header of this name, which torch's headers include: it needs files of CUDA's compiler that no wheel
// of the runtime has. The functions of the runtime are all that is used here.
#pragma once

#include <cuda_runtime_api.h>
