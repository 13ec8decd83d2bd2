#include "ops/testing/shadow_backend.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "core/memory.h"

namespace tessera::testing {
namespace {

using Work = std::function<void()>;

class RecordedShadow final : public RecordedWork {
 public:
  explicit RecordedShadow(std::vector<Work> recorded) : recorded_(std::move(recorded)) {}
  void run() const override {
    for (const Work& work : recorded_) work();
  }
  int64_t num_operations() const override { return std::ssize(recorded_); }

 private:
  std::vector<Work> recorded_;
};

/// Address ranges without memory, each of which stands for memory elsewhere.
class ShadowDevice final : public Device, public std::enable_shared_from_this<ShadowDevice> {
 public:
  ~ShadowDevice() override {
    for (const auto& [begin, range] : ranges_) ::munmap(begin, range.size);
  }

  std::string name() const override { return "shadow"; }
  bool is_host() const override { return false; }

  std::byte* allocate(int64_t num_bytes) override {
    const size_t size = num_bytes;
    void* const begin = ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (begin == MAP_FAILED) return nullptr;
    auto* const address = static_cast<std::byte*>(begin);
    ranges_[address] = {size, Buffer(num_bytes, "a shadow"), {}};
    return address;
  }
  void release(std::byte* data, int64_t num_bytes) noexcept override {
    ranges_.erase(data);
    ::munmap(data, num_bytes);
  }
  /// Small, so that small models have values of many.
  int64_t page_bytes() const override { return kPage; }
  std::byte* reserve(int64_t num_bytes) override {
    std::byte* const address = allocate(num_bytes);
    if (address != nullptr) ranges_[address].pages.resize(num_bytes / kPage);
    return address;
  }
  bool commit(std::byte* pages, int64_t num_bytes) override {
    const auto& [begin, range] = *std::prev(ranges_.upper_bound(pages));
    auto& has = ranges_[begin].pages;
    for (int64_t at = pages - begin; at < pages - begin + num_bytes; at += kPage)
      has[at / kPage] = true;
    return true;
  }
  /// What was there is lost.
  void decommit(std::byte* pages, int64_t num_bytes) override {
    auto& [begin, range] = *std::prev(ranges_.upper_bound(pages));
    const int64_t first = (pages - begin) / kPage;
    for (int64_t page = first; page < first + num_bytes / kPage; ++page) {
      ensure(range.pages.at(page), "shadow: page {} is taken back without being there", page);
      range.pages[page] = false;
    }
    std::memset(range.memory.data() + first * kPage, 0xA5, num_bytes);
  }
  void release_reserved(std::byte* data, int64_t num_bytes) noexcept override {
    release(data, num_bytes);
  }
  std::byte* allocate_shared(int64_t num_bytes) override {
    std::byte* const data = host_device().allocate(num_bytes);
    shared_[data] = num_bytes;
    return data;
  }
  void release_shared(std::byte* data, int64_t num_bytes) noexcept override {
    shared_.erase(data);
    host_device().release(data, num_bytes);
  }
  void copy(void* to, const void* from, int64_t num_bytes) override {
    give([=, this] {
      if (num_bytes > 0) std::memcpy(reach(to), reach(const_cast<void*>(from)), num_bytes);
    });
  }
  void copy_found(void* to, const void* const* from, int64_t num_bytes) override {
    give([=, this] {
      ensure(is_shared(reinterpret_cast<const std::byte*>(from)) &&
                 is_shared(static_cast<const std::byte*>(*from)),
             "shadow: a copy is found in memory that is not shared");
      std::memcpy(reach(to), *from, num_bytes);
    });
  }
  void upload(void* to, const void* from, int64_t num_bytes) override {
    ensure(!recording_, "shadow: an upload was recorded");
    copy(to, from, num_bytes);
  }
  void zero(void* data, int64_t num_bytes) override {
    if (num_bytes == 0) return;
    ensure(reach(data) != data, "zero: memory that is not the device's");
    give([=, this] { std::memset(reach(data), 0, num_bytes); });
  }
  void synchronize() override { ensure(!recording_, "shadow: a wait of the host was recorded"); }
  bool begin_recording() override {
    recording_ = true;
    return true;
  }
  bool is_recording() const override { return recording_; }
  Recording end_recording() override {
    recording_ = false;
    return {.work = std::make_unique<RecordedShadow>(std::exchange(recorded_, {})), .why_not = ""};
  }
  std::unique_ptr<CopyLane> make_copy_lane() override;
  void give(Work work) { recording_ ? recorded_.push_back(std::move(work)) : work(); }
  Mark mark() override { return host_device().mark(); }
  void when_known(Mark begin, Mark end, std::function<void(Time, Time)> use) override {
    host_device().when_known(begin, end, std::move(use));
  }
  int64_t used_bytes() const override { return 0; }

  /// Where the memory is that an address stands for; any other address is itself.
  std::byte* reach(void* address) const {
    auto* const wanted = static_cast<std::byte*>(address);
    auto after = ranges_.upper_bound(wanted);
    if (after == ranges_.begin()) return wanted;
    const auto& [begin, range] = *std::prev(after);
    return wanted < begin + range.size ? range.memory.data() + (wanted - begin) : wanted;
  }
  /// The tensor as the host reaches it.
  Tensor reach(Tensor tensor) const {
    ensure(tensor.device == nullptr || tensor.device == this, "a tensor of another device");
    const bool is_own = tensor.device == this;
    std::byte* const data = reach(tensor.data);
    ensure(tensor.num_bytes() == 0 || tensor.data == nullptr || is_shared(data) ||
               is_own == (data != tensor.data),
           "a tensor does not say whose memory it is");
    tensor.data = data;
    tensor.device = nullptr;
    return tensor;
  }

  /// Throws InternalError where some of the bytes are of reserved pages without memory.
  void check_pages(const std::byte* address, int64_t num_bytes) const {
    auto after = ranges_.upper_bound(const_cast<std::byte*>(address));
    if (after == ranges_.begin() || num_bytes == 0) return;
    const auto& [begin, range] = *std::prev(after);
    if (range.pages.empty() || address >= begin + range.size) return;
    for (int64_t page = (address - begin) / kPage; page * kPage < address - begin + num_bytes;
         ++page)
      ensure(range.pages.at(page), "memory is used that was not asked for: byte {} of {} from {}",
             page * kPage, range.size, address - begin);
  }

 private:
  /// Memory that the host reaches too, whoever the tensor says it is of.
  bool is_shared(const std::byte* data) const {
    const auto after = shared_.upper_bound(data);
    if (after == shared_.begin()) return false;
    const auto& [begin, num_bytes] = *std::prev(after);
    return data < begin + num_bytes;
  }

  static constexpr int64_t kPage = 4096;

  struct Range {
    size_t size = 0;
    Buffer memory;
    std::vector<bool> pages = {};  ///< of reserved addresses: which have memory
  };
  std::map<std::byte*, Range> ranges_;
  std::map<const std::byte*, int64_t> shared_;
  bool recording_ = false;
  std::vector<Work> recorded_;
};

/// Copies and works when that is waited for, as late as it may, behind what was given before; and
/// spoils what is where a copy goes when it is given, as early as it may, but where the host's work
/// comes before it: whoever needs the one or changes the other in between is found.
class SpoilingLane final : public CopyLane {
 public:
  explicit SpoilingLane(ShadowDevice& device) : device_(device) {}

  Ticket give_parts(std::span<const Part> parts) override {
    for (const auto& [to, from, num_bytes] : parts) {
      if (num_bytes == 0) continue;  // its place may be the end of the memory
      ensure((device_.reach(to) == to) != (device_.reach(const_cast<void*>(from)) == from),
             "shadow: a lane copies between the device and the host");
      check_pages(to, from, num_bytes);
      if (num_works_ > 0) continue;
      device_.give(
          [this, at = to, size = num_bytes] { std::memset(device_.reach(at), 0xA5, size); });
    }
    return add([this, copies = std::vector(parts.begin(), parts.end())] {
      for (const auto& [to, from, num_bytes] : copies) {
        check_pages(to, from, num_bytes);
        device_.copy(to, from, num_bytes);
      }
    });
  }
  Ticket give_work(Work work) override {
    ensure(!device_.is_recording(), "shadow: work of the host was recorded");
    ++num_works_;
    return add([this, work = std::move(work)] {
      work();
      --num_works_;
    });
  }
  void join(Ticket copy) override {
    ensure(open_.erase(copy) == 1, "shadow: copy {} was waited for twice", copy);
    while (!undone_.empty() && undone_.begin()->first <= copy)
      undone_.extract(undone_.begin()).mapped()();
  }

 private:
  void check_pages(const void* to, const void* from, int64_t num_bytes) const {
    device_.check_pages(static_cast<const std::byte*>(to), num_bytes);
    device_.check_pages(static_cast<const std::byte*>(from), num_bytes);
  }
  Ticket add(Work work) {
    open_.insert(next_);
    undone_[next_] = std::move(work);
    return next_++;
  }

  ShadowDevice& device_;
  std::set<Ticket> open_;  // that were not joined
  std::map<Ticket, Work> undone_;
  int num_works_ = 0;  // of these, of the host
  Ticket next_ = 0;
};

std::unique_ptr<CopyLane> ShadowDevice::make_copy_lane() {
  return std::make_unique<SpoilingLane>(*this);
}

struct ShadowContext final : public KernelContext {
  ShadowContext(ShadowDevice& own, KernelTable table, std::vector<Work>* lane = nullptr)
      : device(own), kernels(std::move(table)), later(lane) {}
  void give(Work work) const {
    later != nullptr ? later->push_back(std::move(work)) : device.give(std::move(work));
  }

  ShadowDevice& device;
  KernelTable kernels;
  std::vector<Work>* later;  // null: the device does it at once
};

/// Does its work as late as it may.
class LateLane final : public SideLane {
 public:
  LateLane(std::shared_ptr<ShadowDevice> device, KernelTable kernels)
      : device_(std::move(device)), context_(*device_, std::move(kernels), &later_) {}

  bool suits(const Cost& /*cost*/) const override { return true; }
  KernelContext* context() const override { return &context_; }
  void give(const std::function<void()>& start) override { start(); }
  void join() override {
    for (Work& work : std::exchange(later_, {})) device_->give(std::move(work));
  }

 private:
  std::shared_ptr<ShadowDevice> device_;
  std::vector<Work> later_;
  mutable ShadowContext context_;
};

/// A kernel's arguments as the host's have them: actual extents, but of outputs whose extent the
/// call itself makes.
class HostArguments {
 public:
  HostArguments(const ShadowDevice& device, const KernelArgs& args) : args_(args) {
    for (size_t i = 0; i < args.inputs.size(); ++i) inputs_.push_back(argument(device, i));
    for (size_t i = 0; i < args.outputs.size(); ++i)
      outputs_.push_back(argument(device, args.inputs.size() + i));
    device.check_pages(args.workspace.data(), std::ssize(args.workspace));
    workspace_ = {device.reach(args.workspace.data()), args.workspace.size()};
  }
  KernelArgs get() const {
    return {.inputs = inputs_,
            .outputs = outputs_,
            .workspace = workspace_,
            .set_accumulators = args_.set_accumulators};
  }

 private:
  Tensor argument(const ShadowDevice& device, size_t i) const {
    const size_t num_inputs = args_.inputs.size();
    const Tensor& given = i < num_inputs ? args_.inputs[i] : args_.outputs[i - num_inputs];
    Tensor tensor = device.reach(given);
    const int64_t* const extent = i < args_.extents.size() ? args_.extents[i] : nullptr;
    const bool is_own =
        std::ranges::any_of(args_.outputs, [&](const Tensor& out) { return out.data == extent; });
    if (extent != nullptr && !is_own)
      std::memcpy(&tensor.shape[0], device.reach(const_cast<int64_t*>(extent)), sizeof(int64_t));
    device.check_pages(static_cast<const std::byte*>(given.data), tensor.num_bytes());
    return tensor;
  }

  const KernelArgs& args_;
  std::vector<Tensor> inputs_;
  std::vector<Tensor> outputs_;
  std::span<std::byte> workspace_;
};

/// A kernel's arguments, for when the call that was given them is over.
struct KeptArguments {
  explicit KeptArguments(const KernelArgs& args)
      : inputs(args.inputs.begin(), args.inputs.end()),
        outputs(args.outputs.begin(), args.outputs.end()),
        extents(args.extents.begin(), args.extents.end()),
        workspace(args.workspace),
        set_accumulators(args.set_accumulators) {}
  KernelArgs get() const {
    return {.inputs = inputs,
            .outputs = outputs,
            .workspace = workspace,
            .extents = extents,
            .set_accumulators = set_accumulators};
  }
  std::vector<Tensor> inputs, outputs;
  std::vector<const int64_t*> extents;
  std::span<std::byte> workspace;
  bool set_accumulators;
};

void run_on_host(const Operator& op, const KernelArgs& args) {
  const auto& context = static_cast<const ShadowContext&>(*args.context);
  context.give([&op, &context, kept = KeptArguments(args)] {
    const KernelArgs own = kept.get();
    context.kernels.find(op.name())->second(op, HostArguments(context.device, own).get());
  });
}

Kernel disguise(const Kernel& kernel) {
  return Kernel::of<Operator>(
      run_on_host,
      {.workspace =
           [kernel](const Operator& op, std::span<const ValueType> inputs) {
             return Backend({{std::string(op.name()), kernel}}).workspace_bytes(op, inputs);
           },
       .sets_accumulators = kernel.sets_accumulators(),
       .tells_the_host = kernel.tells_the_host(),
       .takes = kernel.format_rule()});
}

class ShadowCommunicator final : public Communicator {
 public:
  ShadowCommunicator(CommunicatorPtr host, std::shared_ptr<ShadowDevice> device,
                     std::shared_ptr<CommStatistics> statistics)
      : Communicator(host->name(), host->ranks(), host->rank(), std::move(statistics)),
        host_(std::move(host)),
        device_(std::move(device)) {}

 private:
  using Rows = std::span<const int64_t>;
  Pending do_all_gather_v(const Tensor& in, const Tensor& out, Rows rows) override {
    return host_->all_gather_v(device_->reach(in), device_->reach(out), rows);
  }
  Pending do_reduce_scatter_v(const Tensor& in, const Tensor& out, Rows rows) override {
    return host_->reduce_scatter_v(device_->reach(in), device_->reach(out), rows);
  }
  Pending do_all_reduce(const Tensor& in, const Tensor& out, ReduceOp op) override {
    return host_->all_reduce(device_->reach(in), device_->reach(out), op);
  }
  Pending do_all_to_all_v(const Tensor& in, const Tensor& out, Rows send_rows,
                          Rows receive_rows) override {
    return host_->all_to_all_v(device_->reach(in), device_->reach(out), send_rows, receive_rows);
  }
  Pending do_send(const Tensor& tensor, int64_t to) override {
    return host_->send(device_->reach(tensor), to);
  }
  Pending do_receive(const Tensor& tensor, int64_t from) override {
    return host_->receive(device_->reach(tensor), from);
  }
  Pending do_broadcast(const Tensor& tensor, int64_t root) override {
    return host_->broadcast(device_->reach(tensor), root);
  }
  void do_barrier() override { host_->barrier(); }

  CommunicatorPtr host_;
  std::shared_ptr<ShadowDevice> device_;
};

class ShadowWorld final : public World {
 public:
  ShadowWorld(World& host, std::shared_ptr<ShadowDevice> device)
      : host_(host), device_(std::move(device)) {}

  int64_t rank() const override { return host_.rank(); }
  int64_t size() const override { return host_.size(); }
  CommunicatorPtr make_group(const std::string& name, const std::vector<int64_t>& ranks) override {
    CommunicatorPtr host = host_.make_group(name, ranks);
    if (ranks.size() == 1) return make_single_communicator(name, rank(), statistics_);
    return std::make_shared<ShadowCommunicator>(std::move(host), device_, statistics_);
  }
  const CommStatistics& statistics() const override { return *statistics_; }
  CommStatistics& statistics() override { return *statistics_; }
  bool ending() override { return host_.ending(); }

 private:
  World& host_;
  std::shared_ptr<ShadowDevice> device_;
  std::shared_ptr<CommStatistics> statistics_ = std::make_shared<CommStatistics>();
};

}  // namespace

Backend make_shadow_backend(KernelTable host_kernels) {
  const auto device = std::make_shared<ShadowDevice>();
  KernelTable kernels;
  for (const auto& [name, kernel] : host_kernels) kernels[name] = disguise(kernel);
  auto lane = std::make_shared<LateLane>(device, host_kernels);
  Backend backend(device, std::make_shared<ShadowContext>(*device, std::move(host_kernels)),
                  std::move(kernels), std::move(lane));
  backend.control().graphs = GraphMode::kOff;
  return backend;
}

std::unique_ptr<World> make_shadow_world(World& host, const Backend& backend) {
  return std::make_unique<ShadowWorld>(
      host, dynamic_cast<ShadowDevice&>(backend.device()).shared_from_this());
}

}  // namespace tessera::testing
