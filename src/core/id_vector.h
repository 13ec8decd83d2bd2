#pragma once

#include <cstddef>
#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

/// The number that a typed index, an enum such as `enum class TaskId : int32_t {}`, stands for.
template <typename Id>
constexpr std::underlying_type_t<Id> number_of(Id id) {
  return static_cast<std::underlying_type_t<Id>>(id);
}

/// A list that only its own kind of index reaches into: an enum, or a class such as ValueId that
/// converts explicitly to size_t. Indices count from 0 in the order of add().
template <typename Id, typename T>
class IdVector {
 public:
  IdVector() = default;
  IdVector(std::initializer_list<T> values) : values_(values) {}
  explicit IdVector(size_t size) : values_(size) {}
  IdVector(size_t size, const T& value) : values_(size, value) {}

  Id add(T value) {
    values_.push_back(std::move(value));
    return id_at(values_.size() - 1);
  }
  decltype(auto) operator[](Id id) { return values_[place(id)]; }
  decltype(auto) operator[](Id id) const { return values_[place(id)]; }
  decltype(auto) at(Id id) { return values_.at(place(id)); }
  decltype(auto) at(Id id) const { return values_.at(place(id)); }
  bool holds(Id id) const { return place(id) < values_.size(); }

  size_t size() const { return values_.size(); }
  void resize(size_t size) { values_.resize(size); }
  bool empty() const { return values_.empty(); }
  /// The index that add() gives next.
  Id next() const { return id_at(values_.size()); }
  std::vector<Id> ids() const {
    std::vector<Id> all;
    for (size_t i = 0; i < values_.size(); ++i) all.push_back(id_at(i));
    return all;
  }
  auto begin() { return values_.begin(); }
  auto end() { return values_.end(); }
  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }
  bool operator==(const IdVector&) const = default;

 private:
  static size_t place(Id id) { return static_cast<size_t>(id); }
  static Id id_at(size_t place) { return static_cast<Id>(place); }

  std::vector<T> values_;
};

}  // namespace tessera
