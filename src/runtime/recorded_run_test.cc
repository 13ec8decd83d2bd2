// Programs on a device that records: here one that does its work on the host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "ops/registry/cpu_kernels.h"
#include "program/dependencies.h"
#include "program/testing/random_program.h"
#include "runtime/executable.h"
#include "runtime/recorded_pass.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

/// Does its work when it is given, in the host's memory, unless it records.
class RecordingDevice final : public Device {
 public:
  using Work = std::function<void()>;

  std::string name() const override { return "recorder"; }
  bool is_host() const override { return false; }
  std::byte* allocate(int64_t num_bytes) override { return host_device().allocate(num_bytes); }
  void release(std::byte* data, int64_t num_bytes) noexcept override {
    host_device().release(data, num_bytes);
  }
  void copy(void* to, const void* from, int64_t num_bytes) override {
    give([=] { host_device().copy(to, from, num_bytes); });
  }
  void zero(void* data, int64_t num_bytes) override {
    give([=] { host_device().zero(data, num_bytes); });
  }
  void synchronize() override { ensure(!recording_, "waited for while it records"); }
  Mark mark() override { return host_device().mark(); }
  void when_known(Mark begin, Mark end, std::function<void(Time, Time)> use) override {
    host_device().when_known(begin, end, std::move(use));
  }
  int64_t used_bytes() const override { return 0; }

  bool begin_recording() override {
    recording_ = can_record;
    return can_record;
  }
  Recording end_recording() override {
    recording_ = false;
    if (!fails.empty()) return {.why_not = fails};
    ++num_recorded;
    return {.work = std::make_unique<Recorded>(*this, std::exchange(work_, {}))};
  }
  void give(Work work) {
    if (recording_) {
      work_.push_back(std::move(work));
    } else {
      work();
      ++num_given;
    }
  }

  bool can_record = true;
  std::string fails;     ///< why recordings fail; "": they do not
  int num_given = 0;     ///< pieces of work that were done at once
  int num_recorded = 0;  ///< recordings
  int num_replayed = 0;  ///< recordings that were run
  bool recording() const { return recording_; }

 private:
  class Recorded final : public RecordedWork {
   public:
    Recorded(RecordingDevice& device, std::vector<Work> work)
        : device_(device), work_(std::move(work)) {}
    void run() const override {
      for (const Work& work : work_) work();
      ++device_.num_replayed;
    }
    int64_t num_operations() const override { return std::ssize(work_); }

   private:
    RecordingDevice& device_;
    std::vector<Work> work_;
  };

  bool recording_ = false;
  std::vector<Work> work_;
};

class Context final : public KernelContext {
 public:
  explicit Context(RecordingDevice& device) : device(device) {}
  int64_t version() const override { return number; }
  RecordingDevice& device;
  int64_t number = 0;
  std::string fails_recording;  ///< the operator whose kernel throws while the device records
  std::string fails;            ///< that which throws whenever it runs
};

/// Gives the CPU's kernel to the device, with what it is to run on.
void give_cpu_kernel(const Operator& op, const KernelArgs& args) {
  static const KernelTable kernels = make_cpu_kernels();
  auto& context = static_cast<Context&>(*args.context);
  ensure(op.name() != context.fails, "the kernel failed");
  ensure(op.name() != context.fails_recording || !context.device.recording(),
         "the kernel cannot be recorded");
  ensure(std::ranges::all_of(args.extents, [](const int64_t* extent) { return extent == nullptr; }),
         "an extent of a value that is not ragged");
  context.device.give([&op, inputs = std::vector(args.inputs.begin(), args.inputs.end()),
                       outputs = std::vector(args.outputs.begin(), args.outputs.end()),
                       workspace = args.workspace, set = args.set_accumulators] {
    kernels.find(op.name())->second(
        op,
        {.inputs = inputs, .outputs = outputs, .workspace = workspace, .set_accumulators = set});
  });
}

KernelTable make_kernels() {
  KernelTable kernels;
  kernels["add"] = Kernel::of<Operator>(give_cpu_kernel);
  kernels["linear_wgrad"] = Kernel::of<Operator>(give_cpu_kernel, {.sets_accumulators = true});
  kernels["slow_copy"] = testing::slow_copy_kernel(testing::start_slow_copy);
  return kernels;
}

/// A program on a device, with its memory there.
class Rig {
 public:
  explicit Rig(const Program& program)
      : device(std::make_shared<RecordingDevice>()),
        context(std::make_shared<Context>(*device)),
        backend(device, context, make_kernels()),
        executable(program, backend),
        bindings(executable.make_bindings()),
        transient_(std::max<int64_t>(executable.plan().transient_bytes, 1), "a test", *device) {
    bindings.transient = transient_.data();
    for (ValueId id = 0; id < program.num_values(); ++id) {
      const Value& value = program.value(id);
      if (value.kind == ValueKind::kIntermediate && !program.is_output(id)) continue;
      memory_.emplace(id, OwnedTensor(value.type.dtype, value.type.shape, "a test", *device));
      bindings.tensors[id] = memory_.at(id);
    }
  }
  void fill(uint64_t seed) const {
    for (const auto& [id, tensor] : memory_) {
      Random random(seed, static_cast<uint64_t>(id));
      for (float& x : tensor.get().span<float>()) x = static_cast<float>(random.next_normal());
    }
  }
  std::vector<float> values() const {
    std::vector<float> all;
    for (const auto& [id, tensor] : memory_) {
      const auto values = tensor.get().span<float>();
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  }
  /// The values after a run from others each time.
  std::vector<float> run(uint64_t seed) const {
    fill(seed);
    executable.run(bindings);
    return values();
  }

  std::shared_ptr<RecordingDevice> device;
  std::shared_ptr<Context> context;
  Backend backend;
  Executable executable;
  Bindings bindings;

 private:
  Buffer transient_;
  std::map<ValueId, OwnedTensor> memory_;
};

Program make_sums() {
  Program program("sums");
  const ValueType type{DType::kF32, {3, 5}};
  const ValueId a = program.add_input("a", type);
  const ValueId b = program.add_input("b", type);
  const ValueId sum = program.add_accumulator("sum", {DType::kF32, {5, 5}});
  const ValueId twice = program.add1(make_add(), {a, b}, "twice");
  program.add(std::make_shared<LinearWgrad>(), {twice, b}, {}, {sum});
  program.set_outputs({twice});
  return program;
}

TEST(Recording, GivesTheBitsOfRunsWithout) {
  Random random(8, 0);
  for (int round = 0; round < 60; ++round) {
    const Program program =
        testing::make_random_program(random, 1 + static_cast<int64_t>(random.next_below(30)));
    const Rig recorded(program);
    const Rig plain(program);
    plain.backend.control().graphs = GraphMode::kOff;
    for (uint64_t seed = 0; seed < 4; ++seed)
      ASSERT_EQ(recorded.run(seed), plain.run(seed)) << "round " << round << ", run " << seed;
    EXPECT_EQ(plain.device->num_recorded, 0);
    EXPECT_EQ(recorded.device->num_replayed, 3 * recorded.device->num_recorded);
    EXPECT_EQ(recorded.backend.control().num_operators, 4 * std::ssize(program.nodes()));
  }
}

TEST(Recording, BeginsWithTheSecondRun) {
  const Rig rig(make_sums());
  rig.run(1);
  EXPECT_EQ(rig.device->num_given, 2);
  EXPECT_EQ(rig.device->num_recorded, 0);
  for (int i = 0; i < 3; ++i) rig.run(1);
  EXPECT_EQ(rig.device->num_given, 2);
  EXPECT_EQ(rig.device->num_recorded, 1);
  EXPECT_EQ(rig.device->num_replayed, 3);
  EXPECT_EQ(rig.backend.control().num_operations, 6);
}

/// An exchange is started and waited for by the host: recordings end there.
TEST(Recording, IsCutAtExchanges) {
  Program program("cut");
  const ValueType type{DType::kF32, {4, 4}};
  const ValueId a = program.add_input("a", type);
  const ValueId sent = program.add1(make_add(), {a, a}, "sent");
  const ValueId copy = program.add1(std::make_shared<testing::SlowCopy>(), {sent}, "copy");
  const ValueId b = program.add1(make_add(), {a, a}, "b");
  const ValueId c = program.add1(make_add(), {b, b}, "c");
  const ValueId d = program.add1(make_add(), {c, copy}, "d");
  program.set_outputs({program.add1(make_add(), {d, d}, "e")});
  const Rig recorded(program);
  const Rig plain(program);
  plain.backend.control().graphs = GraphMode::kOff;
  for (uint64_t seed = 0; seed < 3; ++seed) ASSERT_EQ(recorded.run(seed), plain.run(seed));
  EXPECT_EQ(recorded.device->num_recorded, 3);  // sent; b and c; d and e
  EXPECT_EQ(recorded.device->num_replayed, 6);
}

TEST(Recording, IsOfCertainBindings) {
  Rig rig(make_sums());
  Rig plain(make_sums());
  plain.backend.control().graphs = GraphMode::kOff;
  const std::vector<ValueId> sums = {2};
  for (uint64_t seed = 0; seed < 6; ++seed) {
    rig.bindings.unset = plain.bindings.unset =
        seed % 3 == 0 ? sums : std::vector<ValueId>();  // as the first of three micro-batches
    ASSERT_EQ(rig.run(seed), plain.run(seed)) << "run " << seed;
  }
  EXPECT_EQ(rig.device->num_recorded, 2);
  const OwnedTensor other(DType::kF32, {3, 5}, "a test", *rig.device);
  rig.bindings.tensors[1] = other;
  rig.run(0);
  EXPECT_EQ(rig.device->num_recorded, 2);
  rig.bindings.tensors[1].shape = {5, 3};
  EXPECT_THROW(rig.executable.run(rig.bindings), InternalError);
}

TEST(Recording, IsMadeAnewWhenKernelsReplaceWhatTheyKeep) {
  const Rig rig(make_sums());
  for (int i = 0; i < 3; ++i) rig.run(1);
  ++rig.context->number;
  for (int i = 0; i < 3; ++i) rig.run(1);
  EXPECT_EQ(rig.device->num_given, 4);
  EXPECT_EQ(rig.device->num_recorded, 2);
  EXPECT_EQ(rig.device->num_replayed, 4);
}

TEST(Recording, IsLeftAsideWhereARunIsObserved) {
  const Rig rig(make_sums());
  for (int i = 0; i < 3; ++i) rig.run(1);
  int num_events = 0;
  rig.executable.run(rig.bindings, [&](const NodeEvent&) { ++num_events; });
  EXPECT_EQ(num_events, 2);
  EXPECT_EQ(rig.device->num_replayed, 2);
  rig.run(1);
  EXPECT_EQ(rig.device->num_replayed, 3);
}

/// However a recording fails, the run gives what it gives without, and is not recorded again.
TEST(Recording, ThatFailsLeavesPlainRuns) {
  const auto expect_plain = [](const Rig& rig, const std::string& why) {
    const Rig plain(make_sums());
    plain.backend.control().graphs = GraphMode::kOff;
    for (uint64_t seed = 0; seed < 4; ++seed) EXPECT_EQ(rig.run(seed), plain.run(seed)) << why;
    EXPECT_EQ(rig.device->num_given, 8);
    EXPECT_THAT(rig.backend.control().why_not_recorded, HasSubstr(why));
  };
  const Rig unable(make_sums());
  unable.device->can_record = false;
  expect_plain(unable, "cannot record");
  const Rig failing(make_sums());
  failing.device->fails = "out of memory";
  expect_plain(failing, "out of memory");
  const Rig throwing(make_sums());
  throwing.context->fails_recording = "linear_wgrad";
  expect_plain(throwing, "operator 'linear_wgrad': the kernel cannot be recorded");
}

TEST(Recording, ThatFailsIsAnErrorWhereItIsDemanded) {
  const Rig rig(make_sums());
  rig.backend.control().graphs = GraphMode::kOn;
  rig.device->fails = "out of memory";
  rig.run(1);
  try {
    rig.run(1);
    FAIL() << "nothing was recorded, and nothing said so";
  } catch (const UserError& error) {
    for (const char* part : {"run.cuda_graphs", "'sums'", "out of memory", "auto"})
      EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

TEST(Recording, FailuresOfKernelsNameTheOperator) {
  const Rig rig(make_sums());
  for (int run = 0; run < 2; ++run) {
    rig.context->fails = run == 0 ? "add" : "linear_wgrad";
    try {
      rig.run(1);
      FAIL() << "a failure went by";
    } catch (const InternalError& error) {
      EXPECT_THAT(error.what(), HasSubstr("program 'sums', operator '" + rig.context->fails + "'"));
    }
  }
  rig.context->fails = "";
  for (int i = 0; i < 3; ++i) rig.run(1);
  EXPECT_EQ(rig.device->num_recorded, 1);
}

/// A program that runs three times makes a pass, which is recorded as a whole.
class Passes : public ::testing::Test {
 protected:
  void run(int count) {
    for (int i = 0; i < count; ++i) {
      pass_.run([this] {
        for (int k = 0; k < 3; ++k) rig_.executable.run(rig_.bindings);
      });
    }
  }
  /// The sums, to which each run of the program adds as much.
  void expect_passes(int count) const {
    const Rig plain(make_sums());
    plain.backend.control().graphs = GraphMode::kOff;
    plain.fill(1);
    for (int i = 0; i < 3 * count; ++i) plain.executable.run(plain.bindings);
    EXPECT_EQ(rig_.values(), plain.values());
    EXPECT_EQ(rig_.backend.control().num_operators, 6 * count);
  }

  Rig rig_{make_sums()};
  RecordedPass pass_{rig_.backend};
};

TEST_F(Passes, AreRecordedAtTheSecond) {
  rig_.fill(1);
  run(4);
  expect_passes(4);
  EXPECT_EQ(rig_.device->num_given, 6);
  EXPECT_EQ(rig_.device->num_recorded, 1);
  EXPECT_EQ(rig_.device->num_replayed, 3);
}

TEST_F(Passes, AreRecordedAnewWhenKernelsReplaceWhatTheyKeep) {
  rig_.fill(1);
  run(3);
  ++rig_.context->number;
  run(3);
  expect_passes(6);
  EXPECT_EQ(rig_.device->num_recorded, 2);
}

TEST_F(Passes, ThatCannotBeRecordedLeaveProgramsThatAre) {
  rig_.fill(1);
  run(1);
  rig_.context->fails_recording = "add";
  run(1);
  rig_.context->fails_recording = "";
  run(2);
  expect_passes(4);
  EXPECT_EQ(rig_.device->num_replayed, 0);  // since programs had failed, too
}

TEST_F(Passes, AreNotRecordedWhereThatIsOff) {
  rig_.fill(1);
  rig_.backend.control().graphs = GraphMode::kOff;
  run(3);
  expect_passes(3);
  EXPECT_EQ(rig_.device->num_recorded, 0);
}

TEST(PreparedRuns, AreTheLastUsed) {
  PreparedRuns runs;
  const auto bindings = [](size_t i) {
    Bindings bindings;
    bindings.saved = reinterpret_cast<std::byte*>(64 * (i + 1));  // NOLINT: never followed
    return bindings;
  };
  for (size_t i = 0; i < PreparedRuns::kCapacity; ++i) {
    auto run = std::make_unique<PreparedRun>();
    run->bindings = bindings(i);
    runs.add(std::move(run));
  }
  ASSERT_NE(runs.find(bindings(0)), nullptr);  // so that the second is the oldest
  auto run = std::make_unique<PreparedRun>();
  run->bindings = bindings(PreparedRuns::kCapacity);
  runs.add(std::move(run));
  EXPECT_EQ(runs.size(), PreparedRuns::kCapacity);
  EXPECT_EQ(runs.find(bindings(1)), nullptr);
  for (const size_t i : {size_t{0}, size_t{2}, PreparedRuns::kCapacity})
    EXPECT_EQ(runs.find(bindings(i))->bindings.saved, bindings(i).saved);
}

TEST(Segments, CoverTheProgram) {
  Random random(9, 0);
  for (int round = 0; round < 100; ++round) {
    const Program program =
        testing::make_random_program(random, 1 + static_cast<int64_t>(random.next_below(40)));
    const std::vector<int> waits = find_waits(program);
    size_t next = 0;
    std::set<size_t> begins;
    std::vector<bool> apart;
    for (const Node& node : program.nodes())
      apart.push_back(node.op->communicates() || random.next_below(8) == 0);
    for (const Segment& segment : cut_segments(apart, waits)) {
      EXPECT_EQ(segment.begin, next);
      ASSERT_LT(segment.begin, segment.end);
      begins.insert(segment.begin);
      for (size_t i = segment.begin; i < segment.end; ++i) EXPECT_EQ(apart[i], !segment.recordable);
      next = segment.end;
    }
    EXPECT_EQ(next, program.nodes().size());
    for (size_t i = 0; i < waits.size(); ++i) {
      const size_t wait = waits[i];
      const bool cuts = program.nodes()[i].op->communicates() && wait < next;
      EXPECT_TRUE(!cuts || begins.contains(wait));
    }
  }
}

}  // namespace
}  // namespace tessera
