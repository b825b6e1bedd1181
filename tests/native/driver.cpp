// Calls every exported function of native libraries with awkward shapes, for tools that watch memory
// and threads: AddressSanitizer, UBSan, ThreadSanitizer, valgrind.
//
//   ds_cpu_driver [--large] [--stress N] [--fault overrun|uninitialised|misaligned|race|leak]
//                 [--save FILE] [--like FILE] LIBRARY...
//
// Buffers end where their last element ends, rows are padded with NaN, pointers are not aligned
// beyond their element. Every case runs on one, two and three threads and must give the same bits;
// --stress runs all cases from N threads at once. --fault does what the tool must find. --save
// writes the results, and --like compares with those of another library, of another machine maybe.
#include "driver.h"

#include <dlfcn.h>

#include <thread>

using namespace driver;

namespace {

Library open(const char* path) {
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!handle) fail(dlerror(), path);
  auto symbol = [&](const char* name) {
    void* found = dlsym(handle, name);
    if (!found) fail("not exported", name);
    return found;
  };
  Library library;
#define X(name) library.name = reinterpret_cast<decltype(&ds_cpu_##name)>(symbol("ds_cpu_" #name));
  DRIVER_FUNCTIONS(X)
#undef X
  if (library.abi_version() != DS_CPU_ABI) fail("has another interface", path);
  if (!library.score()) fail("cannot run here", path);
  if (library.threads() < 1) fail("has no thread", path);
  if (library.narrows() != 0 && library.narrows() != 1) fail("says neither yes nor no", path);
  return library;
}

Results once(const Case& c, const Library& library) {
  Results results;
  c.run(library, results);
  return results;
}

void check(const std::vector<Case>& cases, const Library& library) {
  for (const Case& c : cases) {
    library.set_threads(1);
    const Results alone = once(c, library);
    for (int threads : {2, 3}) {
      library.set_threads(threads);
      if (!(once(c, library) == alone)) fail("depends on the number of threads", c.name);
    }
  }
}

void save(const std::vector<Case>& cases, const Library& library, const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (!file) fail("cannot be written", path);
  for (const Case& c : cases) {
    const Results results = once(c, library);
    std::fwrite(results.values().data(), sizeof(float), results.values().size(), file);
  }
  std::fclose(file);
}

// Within a few roundings of the coarsest type: other instructions sum in another order.
void like(const std::vector<Case>& cases, const Library& library, const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (!file) fail("cannot be read", path);
  for (const Case& c : cases) {
    const Results results = once(c, library);
    for (const float x : results.values()) {
      float other = 0;
      if (std::fread(&other, sizeof other, 1, file) != 1) fail("has fewer results", path);
      if (std::fabs(x - other) > 0.02f * (1 + std::fabs(other)))
        fail(("gives " + std::to_string(x) + ", not " + std::to_string(other)).c_str(), c.name);
    }
  }
  std::fclose(file);
}

void stress(const std::vector<Case>& cases, const Library& library, int callers) {
  library.set_threads(2);
  std::vector<Results> wanted;
  for (const Case& c : cases) wanted.push_back(once(c, library));
  std::vector<std::thread> threads;
  for (int t = 0; t < callers; ++t)
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < cases.size(); ++i) {  // each begins elsewhere
        const size_t at = (i + size_t(t) * cases.size() / size_t(callers)) % cases.size();
        if (!(once(cases[at], library) == wanted[at]))
          fail("differs beside other callers", cases[at].name);
      }
    });
  for (auto& thread : threads) thread.join();
}

void fault(const std::string& kind, const Library& library) {
  const int64_t rows = 4, n = 64;
  Random random(1);
  Matrix<float> x(rows, n), weight(1, n), out(rows, n);
  weight.fill(random, 0.0f);
  if (kind != "uninitialised") x.fill(random, 0.0f);
  if (kind == "overrun") {
    Matrix<float> narrow(rows, n - 1);
    library.rms_norm(DS_F32, DS_F32, x.data, n, weight.data, 1e-6, narrow.data, rows, n);
  } else if (kind == "uninitialised") {
    library.rms_norm(DS_F32, DS_F32, x.data, n, weight.data, 1e-6, out.data, rows, n);
    Results results;
    results.take(out, kind);
  } else if (kind == "misaligned") {
    char bytes[3 * sizeof(int64_t)] = {};
    const int64_t* positions = reinterpret_cast<const int64_t*>(bytes + 4);
    library.rope(DS_F32, x.data, n, n, positions, weight.data, out.data, 1, 1, n);
  } else if (kind == "leak") {
    volatile float* lost = new float[size_t(rows * n)];
    lost[0] = 1.0f;
    lost = nullptr;
  } else if (kind == "race") {
    auto write = [&] { library.rms_norm(DS_F32, DS_F32, x.data, n, weight.data, 1e-6, out.data, rows, n); };
    std::thread first(write), second(write);
    first.join();
    second.join();
  } else {
    fail("no such fault", kind);
  }
}

}  // namespace

int main(int argc, char** argv) {
  bool large = false;
  int callers = 0;
  std::string wrong, saved, other;
  std::vector<const char*> paths;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--large") large = true;
    else if (word == "--stress" && i + 1 < argc) callers = std::atoi(argv[++i]);
    else if (word == "--fault" && i + 1 < argc) wrong = argv[++i];
    else if (word == "--save" && i + 1 < argc) saved = argv[++i];
    else if (word == "--like" && i + 1 < argc) other = argv[++i];
    else paths.push_back(argv[i]);
  }
  if (paths.empty()) fail("name a library", argv[0]);
  std::vector<Case> cases;
  small_cases(cases, large);
  matmul_cases(cases, large);
  attention_cases(cases, large);
  sparse_cases(cases, large);
  window_cases(cases);
  for (const char* path : paths) {
    const Library library = open(path);
    if (!wrong.empty())
      fault(wrong, library);
    else if (!saved.empty())
      save(cases, library, saved);
    else if (!other.empty())
      like(cases, library, other);
    else if (callers > 0)
      stress(cases, library, callers);
    else
      check(cases, library);
    std::printf("%s: %zu cases\n", path, cases.size());
  }
  return 0;
}
